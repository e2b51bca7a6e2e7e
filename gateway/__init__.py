"""The gateway: one request flows through `proxy.proxy`; everything else serves that function."""
