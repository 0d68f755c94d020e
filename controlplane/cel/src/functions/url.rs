//! URLs.

use std::collections::BTreeMap;
use std::sync::Arc;

use url::Url;

use super::{failed, traversal};
use crate::cost_meter::CostMeter;
use crate::eval_error::Evaluated;
use crate::value::{Key, Value};

/// Placeholder for the scheme and host of a URL that is only a path.
const BASE: &str = "none://none.invalid";

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    _member: bool,
) -> Option<Evaluated<'a>> {
    let text = |text: &str| Ok(Value::text(text));
    let result = match (name, args) {
        ("url" | "isURL", [Value::String(raw)]) => {
            if let Err(error) = meter.charge(traversal(args[0].cost_size())) {
                return Some(Err(error));
            }
            match (name, parse(raw)) {
                ("isURL", parsed) => Ok(Value::Bool(parsed.is_some())),
                (_, Some(url)) => Ok(Value::Url(Arc::new(url))),
                (_, None) => {
                    failed(format!("URL parse error during conversion from string: {raw:?}: invalid URI"))
                }
            }
        }
        ("getScheme", [Value::Url(url)]) => text(if is_path(url) { "" } else { url.scheme() }),
        ("getHostname", [Value::Url(url)]) => text(hostname(url).trim_matches(['[', ']'])),
        ("getHost", [Value::Url(url)]) => match url.port() {
            Some(port) => text(&format!("{}:{port}", hostname(url))),
            None => text(hostname(url)),
        },
        ("getPort", [Value::Url(url)]) => text(&url.port().map_or_else(String::new, |port| port.to_string())),
        ("getEscapedPath", [Value::Url(url)]) => text(url.path()),
        ("getQuery", [Value::Url(url)]) => Ok(query(url)),
        _ => return None,
    };
    Some(meter.charge(1).and(result))
}

/// Parses an absolute URL or an absolute path, as Go's `url.ParseRequestURI` does.
fn parse(text: &str) -> Option<Url> {
    if text.starts_with('/') {
        return Url::parse(&format!("{BASE}{text}")).ok();
    }
    Url::parse(text).ok().filter(|_| text.contains(':'))
}

fn is_path(url: &Url) -> bool {
    url.as_str().starts_with(BASE)
}

fn hostname(url: &Url) -> &str {
    if is_path(url) { "" } else { url.host_str().unwrap_or_default() }
}

fn query<'a>(url: &Url) -> Value<'a> {
    let mut found: BTreeMap<Key, Vec<Value<'a>>> = BTreeMap::new();
    for (key, value) in url.query_pairs() {
        found.entry(Key::String(key.into_owned())).or_default().push(Value::text(value));
    }
    Value::Map(Arc::new(found.into_iter().map(|(key, values)| (key, Value::list(values))).collect()))
}
