"""Where text becomes settings: from a TOML file, the environment and the command line to one `LiveConfig`.

Begin with `model.py`.
"""
