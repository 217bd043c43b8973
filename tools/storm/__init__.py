"""Writers that are faster than NVMe: does DRAM keep its limit, and do lookups keep answering?"""
