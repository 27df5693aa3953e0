"""Language models, from a checkpoint to tokens.

    checkpoint = quantplug.load_checkpoint("SmolLM2")            # a Hugging Face folder, or a GGUF file
    artefact = quantplug.quantize_language_model(checkpoint.model, "xnnpack", "8da4w", context=512)
    for token in artefact.generate([1, 2, 3], 20): ...
    artefact.save("model.pte"); quantplug.load_language_model("model.pte")

A decoder keeps its keys and values in buffers of its program, so that one method reads a prompt and decodes a token.
"""
