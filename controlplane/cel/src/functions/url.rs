//! URLs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{failed, traversal};
use crate::cost_meter::CostMeter;
use crate::eval_error::{EvalError, Evaluated};
use crate::go_url::GoUrl;
use crate::value::{Key, Value};

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    _member: bool,
) -> Option<Evaluated<'a>> {
    let part = match (name, args) {
        ("url", [Value::String(text)]) => return Some(charge(meter, text).and_then(|()| parse(text))),
        ("isURL", [Value::String(text)]) => {
            return Some(charge(meter, text).map(|()| Value::Bool(GoUrl::check(text).is_ok())));
        }
        ("getQuery", [Value::Url(url)]) => {
            // Each parameter becomes a key of the result, or a further value of a key.
            let parameters = u64::try_from(url.raw_query().split('&').count()).unwrap_or(u64::MAX);
            let charged = charge(meter, url.raw_query()).and_then(|()| meter.charge(parameters));
            return Some(charged.map(|()| query(url)));
        }
        ("getScheme", [Value::Url(url)]) => url.scheme(),
        ("getHostname", [Value::Url(url)]) => url.hostname(),
        ("getHost", [Value::Url(url)]) => url.host(),
        ("getPort", [Value::Url(url)]) => url.port(),
        ("getEscapedPath", [Value::Url(url)]) => url.escaped_path(),
        _ => return None,
    };
    Some(charge(meter, part).map(|()| Value::text(part)))
}

/// Charges a call that reads or copies this text.
fn charge(meter: &mut CostMeter, text: &str) -> Result<(), EvalError> {
    meter.charge(traversal(u64::try_from(text.len()).unwrap_or(u64::MAX)).saturating_add(1))
}

fn parse<'a>(text: &str) -> Evaluated<'a> {
    match GoUrl::parse(text) {
        Ok(url) => Ok(Value::Url(Arc::new(url))),
        Err(error) => failed(format!("URL parse error during conversion from string: {error}")),
    }
}

fn query<'a>(url: &GoUrl) -> Value<'a> {
    let mut found: BTreeMap<Key, Vec<Value<'a>>> = BTreeMap::new();
    for (name, value) in url.parameters() {
        found.entry(Key::String(name)).or_default().push(Value::text(value));
    }
    Value::Map(Arc::new(found.into_iter().map(|(name, values)| (name, Value::list(values))).collect()))
}
