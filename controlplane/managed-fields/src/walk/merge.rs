//! Merges an applied configuration into the live object.

use std::collections::{BTreeSet, VecDeque};

use serde_json::{Map, Value};

use super::{Elements, Pair};
use crate::{
    path::PathElement,
    schema::{Schema, TypeId},
};

/// The live object with the values of the configuration. Parts that the configuration omits stay.
pub(crate) fn merge(schema: &Schema, of: TypeId, live: &Value, config: &Value) -> Value {
    values(schema, of, Some(live), Some(config)).unwrap_or(Value::Null)
}

fn values(schema: &Schema, of: TypeId, live: Option<&Value>, config: Option<&Value>) -> Option<Value> {
    if config.is_none() {
        return live.cloned();
    }
    match Pair::new(schema, of, live, config) {
        Pair::Leaf => config.cloned(),
        Pair::Maps(live, config) => maps(schema, of, live, config),
        Pair::Lists(live, config) => lists(schema, of, live, config),
    }
}

fn maps(
    schema: &Schema,
    of: TypeId,
    live: Option<&Map<String, Value>>,
    config: Option<&Map<String, Value>>,
) -> Option<Value> {
    let names: BTreeSet<&String> = live.into_iter().chain(config).flat_map(Map::keys).collect();
    let mut merged = Map::new();
    for name in names {
        let below = schema.below(of, &PathElement::field(name));
        let (live, config) = (live.and_then(|map| map.get(name)), config.and_then(|map| map.get(name)));
        merged.extend(values(schema, below, live, config).map(|value| (name.clone(), value)));
    }
    (!merged.is_empty()).then_some(Value::Object(merged))
}

/// Elements of the configuration keep their order. An element that is only in the live list stays after its predecessor
/// there, if the configuration's order allows this.
fn lists(schema: &Schema, of: TypeId, live: &[Value], config: &[Value]) -> Option<Value> {
    let (live_elements, config) = (Elements::new(schema, of, live), Elements::new(schema, of, config));
    let is_shared = |element: &&PathElement| live_elements.by_identity.contains_key(element);
    let mut shared: VecDeque<&PathElement> = config.order.iter().filter(is_shared).collect();
    let mut merged = Vec::with_capacity(live.len().max(config.order.len()));
    let mut done: BTreeSet<&PathElement> = BTreeSet::new();
    let both = |element: &PathElement| {
        let below = schema.below(of, element);
        values(schema, below, live_elements.only(element), config.only(element))
    };
    let mut live_rest = live_elements.order.iter().zip(live).peekable();
    let mut config_rest = config.order.iter().peekable();
    loop {
        let (next_live, next_config) = (live_rest.peek().copied(), config_rest.peek().copied());
        if let Some((element, item)) = next_live {
            if next_config == Some(element) {
                merged.extend(both(element));
                done.insert(element);
                shared.pop_front();
                live_rest.next();
                config_rest.next();
                continue;
            }
            let in_config = config.by_identity.contains_key(element);
            // The next live element is also in the configuration, but comes later there.
            let later = next_config.is_some() && shared.front().is_some_and(|next| *next != element);
            if in_config && later {
                live_rest.next();
                continue;
            }
            if !in_config {
                merged.push(item.clone());
                live_rest.next();
                continue;
            }
            if done.contains(element) {
                live_rest.next();
            }
        }
        let Some(element) = next_config else {
            if live_rest.peek().is_none() {
                break;
            }
            // All elements of the configuration are merged. The remaining elements of the live list are already merged,
            // or only the live list has them.
            continue;
        };
        merged.extend(both(element));
        done.insert(element);
        config_rest.next();
        if shared.front() == Some(&element) {
            shared.pop_front();
        }
    }
    (!merged.is_empty()).then_some(Value::Array(merged))
}
