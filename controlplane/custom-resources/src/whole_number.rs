//! Numbers without a fraction. Go writes the float 2.0 as `2`, so clients of upstream read an integer.

use serde_json::{Number, Value};

/// Maximum amount up to which a float represents every whole number exactly: 2^53.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// Replaces floats that are whole numbers by integers: `2.0` by `2`.
pub fn write_whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(whole) = whole(number) {
                *number = whole.into();
            }
        }
        Value::Array(list) => list.iter_mut().for_each(write_whole_numbers),
        Value::Object(map) => map.values_mut().for_each(write_whole_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

fn whole(number: &Number) -> Option<i64> {
    let float = number.as_f64().filter(|_| number.is_f64())?;
    (float.fract() == 0.0 && float.abs() <= MAX_EXACT).then_some(float as i64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn floats_without_a_fraction_are_integers() {
        let mut value = json!({"a": [2.0, -3.0, 2.5, 1e300], "b": {"c": 1e3, "d": 7, "e": "2.0"}});
        write_whole_numbers(&mut value);
        assert_eq!(value, json!({"a": [2, -3, 2.5, 1e300], "b": {"c": 1000, "d": 7, "e": "2.0"}}));
    }
}
