"""A replay over drives that fail at random: does a fault cost more than a miss?"""
