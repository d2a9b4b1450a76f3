"""Values: ids, specs, states, errors, limits. No I/O, nothing imported from above."""
