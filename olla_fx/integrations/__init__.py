"""Callbacks by which the training loops of other libraries run planned: ``hugging_face`` and ``lightning``.

Nothing is imported here: each needs its library, which an extra installs (``olla-fx[integrations]``).
"""
