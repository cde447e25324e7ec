"""How servers write an EAGLE-3 draft: names, config fields, what each can carry; in and out.

A library: `export` writes these forms, every stage that takes a draft can read one made elsewhere.
"""
