"""How each API words an answer: its stream events and its whole bodies, as vLLM 0.32 sends them."""
