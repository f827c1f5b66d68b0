"""SGLang: its record (read everywhere, imports no SGLang), our server (an actor of its own), what SGLang loads in its scheduler
processes (plugin.py and its hooks), and the CPU's part of verl's rollout worker."""
