"""The ``kvtier`` command. Thin: each sub-command lives in a module of its own and is imported only
when it is used, so that ``kvtier --help`` needs neither torch nor kopf."""
