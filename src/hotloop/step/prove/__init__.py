"""A tier run beside eager on real steps and compared, once before it is in force and now and then after."""
