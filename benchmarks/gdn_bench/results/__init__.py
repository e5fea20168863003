"""Rows of results files, and what is made of them: tables, pictures, pages, comparisons."""
