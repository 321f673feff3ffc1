"""Choosing the codes of a matrix column by column: the mathematics of GPTQ, GPTAQ and Qronos.

Notation, after the papers: ``W [N, K]`` is a weight, ``X [K, T]`` what the float model gives it, ``X̃`` what
the quantized one does, ``H = X̃ X̃ᵀ``, ``D = (X − X̃) X̃ᵀ``, λ the damping, ``Q`` the rounded weight,
``E = W − Q``. Everything lies transposed, ``Wt = Wᵀ [K, N]``, so that a column of W, which is what one step
works on, is a row of contiguous memory.
"""
