"""What kvtier costs and gains, measured against a baseline in the same run (`kvtier bench`).

Every benchmark starts agents of its own (`stand`), drives them with the client library that
engines use, and measures its baseline in the same run, in rounds of alternating order (`figures`).
"""
