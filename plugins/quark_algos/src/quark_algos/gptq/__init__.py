"""Choosing the codes of a matrix column by column: the mathematics of GPTQ, GPTAQ and Qronos.

Notation, after the papers: ``W [N, K]`` is a weight, ``X [K, T]`` its input in the float model, ``X̃`` its
input in the quantized model, ``H = X̃ X̃ᵀ``, ``D = (X − X̃) X̃ᵀ``, λ the damping, ``Q`` the rounded weight,
``E = W − Q``. All matrices are stored transposed, ``Wt = Wᵀ [K, N]``, so that a column of W is a row of
contiguous memory.
"""
