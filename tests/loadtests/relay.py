"""The least proxy there is: TCP bytes from one port to another. `python relay.py PORT BACKEND [DROP]`.

With DROP it closes every connection after that many bytes of answer: a proxy that fails its clients.
"""

import asyncio
import sys


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
        if limit is not None and (limit := limit - len(data)) < 0:
            break
    writer.close()


async def main(port: int, backend: int, drop: int | None) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", backend)
        await asyncio.gather(pump(reader, up_writer, None), pump(up_reader, writer, drop), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", port, backlog=1024) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None))
