"""A stock SGLang or vLLM server in capture mode: its command line, its process, its restarts."""
