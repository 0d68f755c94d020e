//! The order of a merged list: the patch's elements as the patch has them, the others between them as before.

use std::collections::VecDeque;

use serde_json::Value;

/// Where an element stands in a list, by its merge key or, without one, by its value.
pub(super) fn position(list: &[Value], item: &Value, key: Option<&str>) -> Option<usize> {
    match key {
        Some(key) => {
            let id = item.get(key)?;
            list.iter().position(|element| element.get(key) == Some(id))
        }
        None => list.iter().position(|element| element == item),
    }
}

/// Orders merged elements: those in `wanted` as there, the others as in `before`, woven by their old places.
pub(super) fn in_order(
    merged: Vec<Value>,
    wanted: &[Value],
    before: &[Value],
    key: Option<&str>,
) -> Vec<Value> {
    let (mut patched, mut others): (Vec<_>, Vec<_>) =
        merged.into_iter().partition(|item| position(wanted, item, key).is_some());
    patched.sort_by_key(|item| position(wanted, item, key));
    others.sort_by_key(|item| position(before, item, key));
    let (mut patched, mut others) = (VecDeque::from(patched), VecDeque::from(others));
    let mut ordered = Vec::with_capacity(patched.len() + others.len());
    loop {
        let other_first = match (others.front(), patched.front()) {
            (None, None) => return ordered,
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (Some(other), Some(patch)) => {
                matches!((position(before, other, key), position(before, patch, key)), (Some(a), Some(b)) if a < b)
            }
        };
        ordered.extend(if other_first { others.pop_front() } else { patched.pop_front() });
    }
}
