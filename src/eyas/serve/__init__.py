"""A stock SGLang server in capture mode: its command line, its process, its restarts."""
