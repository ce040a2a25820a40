"""What a study tunes: a model of the catalog under a framework, a step of the user's own, or published rows.

Begin with `contract.py`: whatever the rest of the tuner asks of it is a method of `AbstractSubject`. `catalog.py`,
`own_step.py` and `replay.py` answer, and `model.py` holds what the first and the last share. The study file's keys
choose one of them, once (`tuner/study_file/subject.py`); nothing else asks which one it is. What only some of them
can do is an `Ability`, and `refusal` says in a sentence why this one cannot.
"""
