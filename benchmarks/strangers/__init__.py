"""Judge Meshtune on clusters that it has never seen: each source of measured runs is left out of all that was fitted.

Begin in __main__.py, which says what is measured. left_out.py makes the profiles without a source, predicting.py quotes
their predictions of it, and tuning.py searches its groups.
"""
