"""Prediction of hand-made 3D plans: data, pipeline and tensor parallel."""
