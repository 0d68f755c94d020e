//! The range of a comprehension.

use crate::eval_error::EvalError;
use crate::value::Value;

/// The range of a comprehension: the elements of a list, or the keys of a map.
pub(super) struct Range<'a> {
    value: Value<'a>,
    keys: Option<Vec<Value<'a>>>,
    pub(super) length: usize,
}

impl<'a> Range<'a> {
    pub(super) fn new(value: Value<'a>) -> Result<Range<'a>, EvalError> {
        let keys = value.keys();
        let length = match (&keys, &value) {
            (Some(keys), _) => keys.len(),
            (None, Value::List(_) | Value::JsonList(..)) => value.size().unwrap_or(0),
            _ => return Err(EvalError::NoOverload),
        };
        Ok(Range { value, keys, length })
    }

    pub(super) fn element(&self, index: usize) -> Value<'a> {
        let found = match &self.keys {
            Some(keys) => keys.get(index).cloned(),
            None => self.value.at(index),
        };
        found.unwrap_or(Value::Null)
    }

    /// Key and value, or index and element.
    pub(super) fn entry(&self, index: usize) -> (Value<'a>, Value<'a>) {
        let first = self.element(index);
        match &self.keys {
            Some(_) => {
                let value = self.value.get(&first).unwrap_or(Value::Null);
                (first, value)
            }
            None => (Value::Int(i64::try_from(index).unwrap_or(i64::MAX)), first),
        }
    }
}
