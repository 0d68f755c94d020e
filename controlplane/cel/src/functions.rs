//! Functions. [`signatures`] has their types; a call with other types ends in [`EvalError::NoOverload`].

mod access;
mod clause;
mod convert;
mod format;
mod ip;
mod list;
mod optional;
mod quantity;
mod semver;
pub(crate) mod signatures;
mod text;
mod time;
mod url;

pub(crate) use self::convert::{TIMESTAMPS, parse_timestamp};
use crate::cost_meter::CostMeter;
use crate::eval_error::{EvalError, Evaluated};
use crate::value::Value;

/// Calls a function. If `member` is true, the first argument is the receiver.
pub(crate) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: Vec<Value<'a>>,
    member: bool,
) -> Evaluated<'a> {
    // Charges for reading the further arguments. Each function charges for its first argument itself.
    for arg in args.iter().skip(1) {
        meter.charge(if matches!(arg, Value::String(_)) { arg.cost_size() / 10 } else { 0 })?;
    }
    optional::call(meter, name, &args, member)
        .or_else(|| text::call(meter, name, &args, member))
        .or_else(|| list::call(meter, name, &args, member))
        .or_else(|| convert::call(meter, name, &args, member))
        .or_else(|| time::call(meter, name, &args, member))
        .or_else(|| quantity::call(meter, name, &args, member))
        .or_else(|| ip::call(meter, name, &args, member))
        .or_else(|| semver::call(meter, name, &args, member))
        .or_else(|| url::call(meter, name, &args, member))
        .or_else(|| format::call(meter, name, &args, member))
        .or_else(|| access::call(meter, name, &args, member))
        .unwrap_or(Err(EvalError::NoOverload))
}

fn failed<T>(text: impl Into<String>) -> Result<T, EvalError> {
    Err(EvalError::Failed(text.into()))
}

/// The cost of reading a text of this size.
fn traversal(size: u64) -> u64 {
    size.div_ceil(10)
}
