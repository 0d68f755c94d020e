//! Keys of maps.

use super::Value;

/// A key of a map.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// `bool`.
    Bool(bool),
    /// `int`, and `uint` if it is in range.
    Int(i64),
    /// `uint`.
    Uint(u64),
    /// `string`.
    String(String),
}

// === impl Key ===

impl Key {
    /// The key of a value. None if the value cannot be a key.
    pub(crate) fn of(value: &Value<'_>) -> Option<Key> {
        match value {
            Value::Bool(flag) => Some(Key::Bool(*flag)),
            Value::Int(number) => Some(Key::Int(*number)),
            Value::Uint(number) => Some(i64::try_from(*number).map_or(Key::Uint(*number), Key::Int)),
            #[expect(clippy::cast_possible_truncation, reason = "the number is whole and in range")]
            Value::Double(number) if number.fract() == 0.0 && number.abs() < 9e18 => {
                Some(Key::Int(*number as i64))
            }
            Value::String(text) => Some(Key::String(text.clone().into_owned())),
            _ => None,
        }
    }

    pub(super) fn to_value<'a>(&self) -> Value<'a> {
        match self {
            Key::Bool(flag) => Value::Bool(*flag),
            Key::Int(number) => Value::Int(*number),
            Key::Uint(number) => Value::Uint(*number),
            Key::String(text) => Value::text(text.clone()),
        }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Key::Bool(flag) => write!(f, "{flag}"),
            Key::Int(number) => write!(f, "{number}"),
            Key::Uint(number) => write!(f, "{number}"),
            Key::String(text) => f.write_str(text),
        }
    }
}
