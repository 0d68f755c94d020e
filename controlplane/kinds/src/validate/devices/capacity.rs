//! Request policies of the capacities of devices. Source: `validateRequestPolicy` of `pkg/apis/resource/validation`.

use std::collections::HashSet;

use serde_json::Value;

use super::limit;
use crate::validate::{Causes, Path, items, text};
use coracle_values::Quantity;

/// Maximum number of valid values of a policy.
const MAX_VALUES: usize = 10;

/// Checks the request policy of a capacity, which has valid values or a valid range.
pub(super) fn policy(causes: &mut Causes, path: &Path, capacity: &Value) {
    let (policy, whole) = (&capacity["requestPolicy"], &capacity["value"]);
    let has_values = items(&policy["validValues"]).next().is_some();
    let (field, default) = match (has_values, policy["validRange"].is_null()) {
        (true, false) => {
            let detail = "exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time";
            return causes.forbidden(path, detail);
        }
        (false, true) => return,
        (true, true) => ("validValues", &policy["default"]),
        (false, false) => ("validRange", &policy["default"]),
    };
    if default.is_null() {
        return causes.required(&path.field("default"), &format!("required when {field} is defined"));
    }
    let here = path.field(field);
    match has_values {
        true => values(causes, &here, (&policy[field], default), whole),
        false => range(causes, &here, (&policy[field], default), whole),
    }
}

fn values(causes: &mut Causes, path: &Path, (list, default): (&Value, &Value), whole: &Value) {
    let amounts: Vec<(&Value, Quantity)> = items(list).map(|(_, value)| (value, amount(value))).collect();
    for (index, pair) in amounts.windows(2).enumerate() {
        if let [(_, before), (value, after)] = pair
            && before > after
        {
            causes.invalid(&path.index(index + 1), value, "values must be sorted in ascending order");
        }
    }
    if limit(causes, path, list, MAX_VALUES) {
        let mut seen = HashSet::new();
        for (index, (value, one)) in amounts.iter().enumerate() {
            if *one > amount(whole) {
                let detail = format!("option is larger than capacity value: {}", text(whole));
                causes.invalid(&path.index(index), value, &detail);
            }
            if !seen.insert(one.value()) {
                causes.duplicate(&path.index(index), &one.value().to_string().into());
            }
        }
    }
    if !amounts.iter().any(|(_, one)| *one == amount(default)) {
        causes.invalid(path, default, "default value is not valid according to the requestPolicy");
    }
}

fn range(causes: &mut Causes, path: &Path, (range, default): (&Value, &Value), whole: &Value) {
    let (min, max, step) = (&range["min"], &range["max"], &range["step"]);
    if min.is_null() {
        return causes.required(&path.field("min"), "required when validRange is defined");
    }
    let mut at_most = |field: &str, (shown, less): (&Value, &str), (bound, of): (&Value, &str)| {
        if amount(shown) > amount(bound) {
            let detail = format!("{less} is larger than {of}: {}", text(bound));
            causes.invalid(&path.field(field), shown, &detail);
        }
    };
    at_most("min", (min, "min"), (whole, "capacity value"));
    if !max.is_null() {
        at_most("max", (min, "min"), (max, "max"));
        at_most("max", (max, "max"), (whole, "capacity value"));
    }
    if amount(default) < amount(min) {
        causes.invalid(&path.field("min"), default, &format!("default is less than min: {}", text(min)));
    }
    if !max.is_null() && amount(default) > amount(max) {
        causes.invalid(&path.field("max"), default, &format!("default is more than max: {}", text(max)));
    }
    if !step.is_null() {
        let added = amount(min).plus(amount(step));
        if added > amount(whole) {
            let detail = format!("one step {} is larger than capacity value: {}", added.value(), text(whole));
            causes.invalid(&path.field("step"), step, &detail);
        }
        steps(causes, &path.field("step"), default, (min, step));
        if !max.is_null() {
            steps(causes, &path.field("step"), max, (min, step));
        }
    }
}

/// Checks that a value is a number of steps above the minimum. A step of 0 has no multiples but 0.
fn steps(causes: &mut Causes, path: &Path, value: &Value, (min, step): (&Value, &Value)) {
    let distance = i128::from(amount(value).value()) - i128::from(amount(min).value());
    let is_multiple = distance.checked_rem(i128::from(amount(step).value())).unwrap_or(distance) == 0;
    if !is_multiple {
        let detail = format!("value is not a multiple of a given step ({}) from ({})", text(step), text(min));
        causes.invalid(path, value, &detail);
    }
}

/// The quantity of a text. The schema refuses other texts.
fn amount(value: &Value) -> Quantity {
    Quantity::parse(text(value)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(requested: Value) -> Vec<String> {
        let mut causes = Causes::default();
        let capacity = json!({"value": "10Gi", "requestPolicy": requested});
        policy(&mut causes, &Path::root("p"), &capacity);
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn a_policy_has_values_or_a_range() {
        let (values, range) = (json!(["1Gi", "2Gi"]), json!({"min": "1Gi", "max": "4Gi", "step": "1Gi"}));
        assert_eq!(problems(json!({"default": "1Gi", "validValues": values})), [""; 0]);
        assert_eq!(problems(json!({"default": "3Gi", "validRange": range})), [""; 0]);
        assert_eq!(problems(json!({"default": "1Gi"})), [""; 0]);
        assert_eq!(problems(json!({"default": "1Gi", "validValues": values, "validRange": range})), ["p"]);
        assert_eq!(problems(json!({"validValues": values})), ["p.default"]);
        assert_eq!(problems(json!({"validRange": range})), ["p.default"]);
    }

    #[test]
    fn values_are_sorted_and_fit_the_capacity() {
        let values = |list: Value| problems(json!({"default": "1Gi", "validValues": list}));
        assert_eq!(values(json!(["2Gi", "1Gi"])), ["p.validValues[1]"]);
        assert_eq!(values(json!(["1Gi", "11Gi"])), ["p.validValues[1]"]);
        assert_eq!(values(json!(["1Gi", "1024Mi"])), ["p.validValues[1]"]);
        assert_eq!(values(json!(["2Gi"])), ["p.validValues"]);
        let many: Vec<Value> = (1..=11).map(|number| json!(format!("{number}"))).collect();
        assert_eq!(problems(json!({"default": "1", "validValues": many})), ["p.validValues"]);
    }

    #[test]
    fn a_range_has_bounds_and_steps() {
        let range = |range: Value| problems(json!({"default": "2Gi", "validRange": range}));
        assert_eq!(range(json!({})), ["p.validRange.min"]);
        assert_eq!(range(json!({"min": "3Gi"})), ["p.validRange.min"]);
        assert_eq!(range(json!({"min": "1Gi", "max": "11Gi"})), ["p.validRange.max"]);
        assert_eq!(range(json!({"min": "1Gi", "max": "1Gi"})), ["p.validRange.max"]);
        assert_eq!(range(json!({"min": "1Gi", "step": "3Gi"})), ["p.validRange.step"]);
        assert_eq!(range(json!({"min": "1Gi", "step": "0"})), ["p.validRange.step"]);
        assert_eq!(range(json!({"min": "2Gi", "step": "9Gi"})), ["p.validRange.step"]);
    }
}
