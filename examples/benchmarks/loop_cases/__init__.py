"""The loops that ``loops.py`` times: models, batches and training as their users write them."""
