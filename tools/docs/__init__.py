"""The generated parts of the documentation: tables of the registry, pages of hooks, API pages, pictures.

`hooks` adds these parts to MkDocs.
"""
