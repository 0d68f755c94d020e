//! The amounts of a shared device that requests may consume. Source: `validateRequestPolicy` of
//! `pkg/apis/resource/validation`.

use std::collections::HashSet;

use coracle_values::Quantity;
use serde_json::Value;

use super::limit;
use crate::validate::{Causes, Path, items};

const MAX_VALUES: usize = 10;
const ONE_POLICY: &str = "exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at \
    the same time";

/// Checks the request policy of a capacity.
pub(super) fn check(causes: &mut Causes, path: &Path, capacity: &Value) {
    let policy = &capacity["requestPolicy"];
    let has_values = items(&policy["validValues"]).next().is_some();
    let has_range = policy["validRange"].is_object();
    let (default, whole) = (parse(&policy["default"]), parse(&capacity["value"]));
    let required = |causes: &mut Causes, field: &str| {
        causes.required(&path.field("default"), &format!("required when {field} is defined"));
    };
    match (has_values, has_range, default, whole) {
        (true, true, ..) => causes.forbidden(path, ONE_POLICY),
        (true, false, None, _) => required(causes, "validValues"),
        (false, true, None, _) => required(causes, "validRange"),
        (true, false, Some(default), Some(whole)) => {
            values(causes, &path.field("validValues"), &policy["validValues"], default, whole);
        }
        (false, true, Some(default), Some(whole)) => {
            range(causes, &path.field("validRange"), &policy["validRange"], default, whole);
        }
        _ => {}
    }
}

fn parse(amount: &Value) -> Option<Quantity> {
    Quantity::parse(amount.as_str()?).ok()
}

/// Checks the amounts that a request may have: they are sorted and different.
fn values(causes: &mut Causes, path: &Path, list: &Value, default: Quantity, whole: Quantity) {
    let amounts: Vec<(usize, Quantity)> =
        items(list).filter_map(|(index, amount)| Some((index, parse(amount)?))).collect();
    for pair in amounts.windows(2) {
        if let [(_, one), (index, next)] = pair
            && one > next
        {
            let detail = "values must be sorted in ascending order";
            causes.invalid(&path.index(*index), &next.to_string().into(), detail);
        }
    }
    let mut has_default = false;
    if limit(causes, path, list, MAX_VALUES) {
        for (index, amount) in &amounts {
            if *amount > whole {
                let detail = format!("option is larger than capacity value: {whole}");
                causes.invalid(&path.index(*index), &amount.to_string().into(), &detail);
            }
            has_default |= *amount == default;
        }
        let mut seen = HashSet::new();
        for (index, amount) in &amounts {
            if !seen.insert(amount.value()) {
                causes.duplicate(&path.index(*index), &amount.value().to_string().into());
            }
        }
    }
    if !has_default {
        let detail = "default value is not valid according to the requestPolicy";
        causes.invalid(path, &default.to_string().into(), detail);
    }
}

/// Checks the range of the amounts that a request may have.
fn range(causes: &mut Causes, path: &Path, range: &Value, default: Quantity, whole: Quantity) {
    let Some(min) = parse(&range["min"]) else {
        return causes.required(&path.field("min"), "required when validRange is defined");
    };
    let mut refuse = |wrong: bool, field: &str, value: Quantity, detail: String| {
        if wrong {
            causes.invalid(&path.field(field), &value.to_string().into(), &detail);
        }
    };
    refuse(min > whole, "min", min, format!("min is larger than capacity value: {whole}"));
    refuse(default < min, "min", default, format!("default is less than min: {min}"));
    let max = parse(&range["max"]);
    if let Some(max) = max {
        refuse(min > max, "max", min, format!("min is larger than max: {max}"));
        refuse(max > whole, "max", max, format!("max is larger than capacity value: {whole}"));
        refuse(default > max, "max", default, format!("default is more than max: {max}"));
    }
    let Some(step) = parse(&range["step"]) else { return };
    let first = min.plus(step);
    let detail = format!("one step {first} is larger than capacity value: {whole}");
    refuse(first > whole, "step", step, detail);
    for value in [Some(default), max].into_iter().flatten() {
        // A step of zero has no multiples, so every amount is refused. Upstream would divide by zero.
        let added = value.value().saturating_sub(min.value());
        let fits = added.checked_rem(step.value()) == Some(0);
        let detail = format!("value is not a multiple of a given step ({step}) from ({min})");
        refuse(!fits, "step", value, detail);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::tests::found;

    fn said(policy: Value) -> Vec<String> {
        let capacity = json!({"value": "10", "requestPolicy": policy});
        found(|causes| check(causes, &Path::root("p"), &capacity))
    }

    #[test]
    fn values_are_sorted_and_contain_the_default() {
        assert_eq!(said(json!({"default": "2", "validValues": ["1", "2", "10"]})), Vec::<String>::new());
        assert_eq!(said(json!({})), Vec::<String>::new());
        assert_eq!(
            said(json!({"validValues": ["1"]})),
            ["p.default: Required value: required when validValues is defined"]
        );
        assert_eq!(
            said(json!({"default": "3", "validValues": ["2", "1", "11", "11"]})),
            [
                "p.validValues[1]: Invalid value: \"1\": values must be sorted in ascending order",
                "p.validValues[2]: Invalid value: \"11\": option is larger than capacity value: 10",
                "p.validValues[3]: Invalid value: \"11\": option is larger than capacity value: 10",
                "p.validValues[3]: Duplicate value: \"11\"",
                "p.validValues: Invalid value: \"3\": default value is not valid according to the requestPolicy",
            ]
        );
    }

    #[test]
    fn a_range_has_steps_from_its_minimum() {
        let range = |range: Value| said(json!({"default": "3", "validRange": range}));
        assert_eq!(range(json!({"min": "1", "max": "9", "step": "2"})), Vec::<String>::new());
        assert_eq!(
            range(json!({})),
            ["p.validRange.min: Required value: required when validRange is defined"]
        );
        assert_eq!(
            range(json!({"min": "4", "max": "11", "step": "0"})),
            [
                "p.validRange.min: Invalid value: \"3\": default is less than min: 4",
                "p.validRange.max: Invalid value: \"11\": max is larger than capacity value: 10",
                "p.validRange.step: Invalid value: \"3\": value is not a multiple of a given step (0) from (4)",
                "p.validRange.step: Invalid value: \"11\": value is not a multiple of a given step (0) from (4)",
            ]
        );
        let both = json!({"default": "1", "validValues": ["1"], "validRange": {"min": "1"}});
        assert!(said(both)[0].starts_with("p: Forbidden: exactly one policy"));
    }
}
