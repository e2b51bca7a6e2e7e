-- One round trip of one replica for one tenant: it reports what it spent of each limit, has requests decided, and gets
-- leases. policies/leases.py tells what a lease is.
--
-- KEYS: one hash for each limit, all in the tenant's slot. In it: `t`, for a rate the moment (in microseconds) at which
-- it is unused again, and for each replica its lease, as "amount expiry".
-- ARGV: replica, lease (us), divisor of what is free for leases, number of requests;
--       for each limit: 1 if it is a rate or 0, room, spent (running, if no rate), kept, wish, least, known;
--       for each request: its cost for each limit, 0 where the limit does not concern it.
-- Returns: for each limit what is free, what is used and the extra lease; then 1 or 0 for each request.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local me, lease, divisor, requests = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local limits = {}

for i, key in ipairs(KEYS) do
  local at = 4 + 7 * (i - 1)
  local limit = {
    rate = ARGV[at + 1] == '1', room = tonumber(ARGV[at + 2]), spent = tonumber(ARGV[at + 3]),
    kept = tonumber(ARGV[at + 4]), wish = tonumber(ARGV[at + 5]),
    least = tonumber(ARGV[at + 6]), mark = nil, others = 0, ends = now,
  }
  local fields = redis.call('HGETALL', key)
  for f = 1, #fields, 2 do
    if fields[f] == 't' then
      limit.mark = tonumber(fields[f + 1])
    elseif fields[f] ~= me then
      local amount, expiry = fields[f + 1]:match('(%d+) (%d+)')
      amount, expiry = tonumber(amount), tonumber(expiry)
      if expiry > now then
        limit.others = limit.others + amount
        limit.ends = math.max(limit.ends, expiry)
      else
        if limit.rate then limit.spent = limit.spent + amount end -- nobody has told what became of it
        redis.call('HDEL', key, fields[f])
      end
    end
  end
  if limit.rate then
    limit.mark = math.max(limit.mark or now + tonumber(ARGV[at + 7]), now) + limit.spent
    limit.used = math.max(0, limit.mark - now)
  else
    limit.used = limit.spent
  end
  limit.free = limit.room - limit.used - limit.others - limit.kept
  limits[i] = limit
end

local verdicts = {}
for r = 1, requests do
  local at = 4 + 7 * #KEYS + (r - 1) * #KEYS
  local fits = 1
  for i, limit in ipairs(limits) do
    local cost = tonumber(ARGV[at + i])
    if cost > 0 and cost > limit.free then fits = 0 end
  end
  if fits == 1 then
    for i, limit in ipairs(limits) do
      local cost = tonumber(ARGV[at + i])
      limit.free = limit.free - cost
      limit.used = limit.used + cost
      if limit.rate and cost > 0 then limit.mark = math.max(limit.mark, now) + cost end
    end
  end
  verdicts[r] = fits
end

local reply = {}
for i, limit in ipairs(limits) do
  local extra = math.max(0, math.min(limit.wish, math.floor(limit.free / divisor)))
  if extra < limit.least then extra = 0 end -- it would be of no use, and missing elsewhere
  local amount = limit.kept + extra
  if limit.rate then
    redis.call('HSET', KEYS[i], 't', string.format('%.0f', limit.mark))
  else
    amount = amount + limit.used
  end
  if amount > 0 then
    redis.call('HSET', KEYS[i], me, string.format('%.0f %.0f', amount, now + lease))
    limit.ends = math.max(limit.ends, now + lease)
  else
    redis.call('HDEL', KEYS[i], me)
  end
  -- kept for as long as any replica may remember something of it: forgotten too soon, it would be told anew
  local keep = limit.rate and math.max(limit.used, limit.room) or 0
  redis.call('PEXPIRE', KEYS[i], string.format('%.0f', math.ceil((math.max(limit.ends - now, keep)) / 1000) + 1000))
  reply[#reply + 1] = limit.free - extra
  reply[#reply + 1] = limit.used
  reply[#reply + 1] = extra
end
for _, verdict in ipairs(verdicts) do reply[#reply + 1] = verdict end
return reply
