"""Is it exact? Measured on a real model, for this engine or another.

`run.audit` draws many short texts, `law` has the exact law of every token in them, `statistics`
tests the one against the other, and `report` says what came of it.
"""
