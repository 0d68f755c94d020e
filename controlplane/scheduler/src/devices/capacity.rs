//! The capacity of devices that claims consume. Source: `consumable_capacity.go` of
//! `dynamic-resource-allocation/structured`.

use coracle_values::Quantity;
use serde_json::Value;

use super::object::{Device, Exact};

/// The amount that a request consumes of one capacity of a shared device.
pub(super) struct Consumption<'a> {
    /// Name of the capacity.
    pub(super) name: &'a str,
    pub(super) amount: Quantity,
    /// The amount in thousandths.
    thousandths: i128,
    /// The free amount of the capacity, without the allocated shares, in thousandths.
    left: i128,
}

/// The amount that a request consumes of each capacity of a device, in the device's order. Empty for a device that one
/// claim uses alone. `allocated` is the amount that allocated shares consume of a capacity, in thousandths.
///
/// `None` if the device does not have the requested capacity, or has too little free capacity. Also `None` if the
/// device's policy does not allow the amount.
pub(super) fn consumed<'a>(
    device: &'a Device,
    exact: &Exact,
    allocated: impl Fn(&str) -> i128,
) -> Option<Vec<Consumption<'a>>> {
    let requests = exact.capacity.as_ref().and_then(|capacity| capacity["requests"].as_object());
    if requests.is_none() && !device.is_shared() {
        return Some(Vec::new());
    }
    if requests.into_iter().flatten().any(|(name, _)| !device.capacity.contains_key(name)) {
        return None;
    }
    let mut found = Vec::new();
    for (name, capacity) in &device.capacity {
        let limit = amount(&capacity["value"])?;
        let policy = &capacity["requestPolicy"];
        let consumed = match requests.and_then(|requests| requests.get(name)) {
            Some(requested) => round_up(amount(requested)?, policy),
            None => amount(&policy["default"]).unwrap_or(limit),
        };
        // Refuse a negative amount. Otherwise other claims would get more than the device has.
        if consumed.signum() < 0 || consumed > limit || violates(consumed, policy) {
            return None;
        }
        if device.is_shared() {
            let left = limit.thousandths().saturating_sub(allocated(name));
            found.push(Consumption { name, amount: consumed, thousandths: consumed.thousandths(), left });
        }
    }
    suffices(&found, &[]).then_some(found)
}

/// Whether the capacity of a device suffices for a request beside other requests for the same device.
pub(super) fn suffices(own: &[Consumption<'_>], others: &[&[Consumption<'_>]]) -> bool {
    own.iter().enumerate().all(|(index, one)| {
        // All requests consume the same capacities of a device, in the same order.
        let others = others.iter().filter_map(|other| other.get(index));
        let total = others.fold(one.thousandths, |sum, other| sum.saturating_add(other.thousandths));
        total <= one.left
    })
}

/// Reads a quantity. `None` if the value is not a quantity, which the API server does not store.
pub(super) fn amount(value: &Value) -> Option<Quantity> {
    match value {
        Value::String(text) => Quantity::parse(text).ok(),
        Value::Number(number) => Quantity::parse(&number.to_string()).ok(),
        _ => None,
    }
}

/// Rounds the requested amount up to the next amount that the policy allows. Returns the requested amount if the policy
/// allows no larger amount.
fn round_up(requested: Quantity, policy: &Value) -> Quantity {
    let range = &policy["validRange"];
    if let Some(min) = amount(&range["min"]) {
        return match amount(&range["step"]) {
            _ if requested < min => min,
            Some(step) => next_step(requested, min, step).unwrap_or(requested),
            None => requested,
        };
    }
    values(policy).find(|value| requested <= *value).unwrap_or(requested)
}

/// The requested amount, rounded up to `min` and a multiple of `step`, in whole units. `None` if the step is 0, or the
/// result is out of range.
fn next_step(requested: Quantity, min: Quantity, step: Quantity) -> Option<Quantity> {
    let (min, step) = (min.value(), step.value());
    let added = requested.value().checked_sub(min)?;
    let rest = added.checked_rem(step)?;
    let missing = if rest == 0 { 0 } else { step.checked_sub(rest)? };
    let units = min.checked_add(added)?.checked_add(missing)?;
    // As upstream, the result has the binary format of quantities.
    let unit = Quantity::parse("1Ki").ok()?;
    Some(unit.with_thousandths(i128::from(units) * 1000))
}

/// Whether the policy forbids the amount.
fn violates(consumed: Quantity, policy: &Value) -> bool {
    if amount(&policy["default"]) == Some(consumed) {
        return false;
    }
    let range = &policy["validRange"];
    if range.is_object() {
        let min = amount(&range["min"]).unwrap_or_default();
        let is_step = |step: Quantity| {
            let added = consumed.value().saturating_sub(min.value());
            added.checked_rem(step.value()) == Some(0)
        };
        return amount(&range["max"]).is_some_and(|max| consumed > max)
            || amount(&range["step"]).is_some_and(|step| !is_step(step));
    }
    let mut values = values(policy).peekable();
    values.peek().is_some() && !values.any(|value| value == consumed)
}

/// The amounts of a policy that has a list of them.
fn values(policy: &Value) -> impl Iterator<Item = Quantity> {
    policy["validValues"].as_array().into_iter().flatten().filter_map(amount)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The text of the amount of the capacity `memory`.
    fn of(capacity: Value, requested: Value) -> Option<String> {
        let device = json!({"name": "d", "allowMultipleAllocations": true, "capacity": {"memory": capacity}});
        let device: Device = serde_json::from_value(device).unwrap();
        let exact = json!({"deviceClassName": "c", "capacity": {"requests": requested}});
        let exact: Exact = serde_json::from_value(exact).unwrap();
        let consumed = consumed(&device, &exact, |_| 0)?;
        Some(consumed.iter().map(|one| format!("{} {}", one.name, one.amount)).collect())
    }

    #[test]
    fn a_policy_rounds_requests_up_or_refuses_them() {
        let none = json!(null);
        let values = json!({"default": "1Gi", "validValues": ["1Gi", "4Gi", "8Gi"]});
        let range = json!({"default": "1Gi", "validRange": {"min": "1Gi", "max": "5Gi", "step": "2Gi"}});
        let open = json!({"default": "2Gi", "validRange": {"min": "2Gi"}});
        let zero = json!({"default": "1", "validRange": {"min": "1", "step": "0"}});
        let default = json!({"default": "3Gi"});
        let cases = [
            (&none, json!({}), Some("8Gi")),
            (&none, json!({"memory": "3Gi"}), Some("3Gi")),
            (&none, json!({"memory": 3}), Some("3")),
            (&none, json!({"memory": "9Gi"}), None),
            (&none, json!({"memory": "-3Gi"}), None),
            (&none, json!({"memory": "1Gi", "cores": "1"}), None),
            (&default, json!({}), Some("3Gi")),
            (&default, json!({"memory": "1Gi"}), Some("1Gi")),
            (&values, json!({}), Some("1Gi")),
            (&values, json!({"memory": "1025Mi"}), Some("4Gi")),
            (&values, json!({"memory": "9Gi"}), None),
            (&range, json!({"memory": "1"}), Some("1Gi")),
            (&range, json!({"memory": "2Gi"}), Some("3Gi")),
            (&range, json!({"memory": "5Gi"}), Some("5Gi")),
            (&range, json!({"memory": "6Gi"}), None),
            (&open, json!({"memory": "3Gi"}), Some("3Gi")),
            (&open, json!({"memory": "1Gi"}), Some("2Gi")),
            (&zero, json!({"memory": "2"}), None),
        ];
        for (policy, requested, expected) in cases {
            let expected = expected.map(|amount| format!("memory {amount}"));
            let found = of(json!({"value": "8Gi", "requestPolicy": policy}), requested.clone());
            assert_eq!(found, expected, "{policy} {requested}");
        }
    }

    #[test]
    fn a_device_of_one_claim_must_have_the_requested_capacity() {
        let device = json!({"name": "d", "capacity": {"memory": {"value": "8Gi"}}});
        let device: Device = serde_json::from_value(device).unwrap();
        let fits = |requests: Value| {
            let exact = Exact { capacity: Some(json!({"requests": requests})), ..Exact::default() };
            consumed(&device, &exact, |_| 0).map(|consumed| consumed.len())
        };
        assert_eq!(fits(json!({"memory": "8Gi"})), Some(0));
        assert_eq!(fits(json!({"memory": "9Gi"})), None);
        assert_eq!(fits(json!({"cores": "1"})), None);
        assert_eq!(consumed(&device, &Exact::default(), |_| 0).map(|consumed| consumed.len()), Some(0));
    }

    #[test]
    fn requests_share_what_allocated_shares_leave() {
        let capacity = json!({"cores": {"value": "4"}, "memory": {"value": "8Gi"}});
        let device = json!({"name": "d", "allowMultipleAllocations": true, "capacity": capacity});
        let device: Device = serde_json::from_value(device).unwrap();
        let of = |requests: Value, cores: i128| {
            let exact = Exact { capacity: Some(json!({"requests": requests})), ..Exact::default() };
            consumed(&device, &exact, |name| if name == "cores" { cores * 1000 } else { 0 })
        };
        let all_memory = json!({"cores": "1"});
        assert!(of(all_memory.clone(), 4).is_none());
        let (one, two) = (of(all_memory, 3).unwrap(), of(json!({"cores": "1", "memory": "0"}), 2).unwrap());
        assert!(suffices(&two, &[]) && suffices(&two, &[&two]) && !suffices(&two, &[&two, &two]));
        assert!(suffices(&two, &[&one]) && !suffices(&one, &[&one]));
    }
}
