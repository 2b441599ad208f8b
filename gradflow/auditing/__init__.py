"""What a trained transformer does to the gradient, and a saved audit to hold a model against.

`audits` is ``gradflow.audit``, `result` what it returns; `streamed` goes block by block where memory is short, `encoded` has an
encoder beside the decoder. Said beside the factors: `sinks` and `apart` (tokens that stand out), `growth` (of the stream),
`attribution`, `block_spectra`, `contradictions`. `tables`, `report`, `columns` and `panels` show it; `baselines` compares.
"""
