"""Credit from evidence to update, in pure torch: one topic per module, functions of tensors.

packed → concentration → gate → transport → reach / normalize → baselines / objective; schedule and
controller hold the scalars that change from step to step.
"""
