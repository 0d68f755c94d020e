//! Sums over the containers of a pod, for pod-level resources. Source: `AggregateContainerRequests` of
//! `component-helpers/resource`.

use std::collections::BTreeMap;

use coracle_values::CollectMap;
use coracle_values::Quantity;
use serde_json::Value;

type Amounts = BTreeMap<String, Quantity>;

/// Whether `spec.resources` of a pod can have this resource.
pub(crate) fn is_supported(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || is_huge_pages(name)
}

/// Whether the resource is `hugepages-SIZE`.
pub(crate) fn is_huge_pages(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// The amount of each resource in `requests` or `limits` that the containers need together. An init container runs
/// before the containers, and at the same time as the sidecars that precede it.
pub(crate) fn sum(spec: &Value, list: &str) -> Amounts {
    let mut all = Amounts::default();
    for container in containers(spec, "containers") {
        add(&mut all, &amounts(container, list));
    }
    let (mut sidecars, mut starting) = (Amounts::default(), Amounts::default());
    for container in containers(spec, "initContainers") {
        let own = amounts(container, list);
        if container["restartPolicy"] == "Always" {
            add(&mut all, &own);
            add(&mut sidecars, &own);
            raise(&mut starting, &sidecars);
        } else {
            let mut together = own;
            add(&mut together, &sidecars);
            raise(&mut starting, &together);
        }
    }
    raise(&mut all, &starting);
    all
}

fn containers<'a>(spec: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> {
    spec[list].as_array().into_iter().flatten()
}

/// The amounts of one container. Strings that are not quantities are omitted.
fn amounts(container: &Value, list: &str) -> Amounts {
    let entries = container["resources"][list].as_object().into_iter().flatten();
    entries
        .filter_map(|(name, amount)| Some((name.clone(), Quantity::parse(amount.as_str()?).ok()?)))
        .collect_map()
}

fn add(to: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        to.entry(name.clone()).and_modify(|sum| *sum = sum.plus(*amount)).or_insert(*amount);
    }
}

fn raise(to: &mut Amounts, least: &Amounts) {
    for (name, amount) in least {
        to.entry(name.clone()).and_modify(|sum| *sum = (*sum).max(*amount)).or_insert(*amount);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sidecars_count_with_later_init_containers_and_with_containers() {
        let with = |cpu: &str, more: Value| {
            let mut container = json!({"resources": {"requests": {"cpu": cpu}}});
            if !more.is_null() {
                container["restartPolicy"] = more;
            }
            container
        };
        let spec = json!({"containers": [with("1", Value::Null), with("500m", Value::Null)], "initContainers": [
            with("2", Value::Null), with("1", json!("Always")), with("4", Value::Null)]});
        assert_eq!(sum(&spec, "requests")["cpu"].to_string(), "5");
        assert!(sum(&spec, "limits").is_empty());
    }
}
