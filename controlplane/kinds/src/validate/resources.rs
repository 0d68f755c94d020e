//! Requests and limits of containers.

use serde_json::Value;

use super::{Causes, Path, entries, format};
use coracle_values::Quantity;

/// Checks `resources` of a container.
pub(super) fn container(causes: &mut Causes, path: &Path, resources: &Value) {
    for list in ["limits", "requests"] {
        for (name, amount) in entries(&resources[list]) {
            let here = path.field(list).key(name);
            resource_name(causes, &here, name);
            quantity(causes, &here, name, amount);
        }
    }
    for (name, amount) in entries(&resources["requests"]) {
        let (request, limit) = (parse(amount), parse(&resources["limits"][name]));
        let (Some(request), Some(limit)) = (request, limit) else { continue };
        let exact = is_extended(name) || name.starts_with("hugepages-");
        if exact && request != limit {
            causes.invalid(
                &path.field("requests"),
                amount,
                &format!("must be equal to {name} limit of {limit}"),
            );
        } else if request > limit {
            let detail = format!("must be less than or equal to {name} limit of {limit}");
            causes.invalid(&path.field("requests"), amount, &detail);
        }
    }
    for (name, amount) in entries(&resources["requests"]) {
        let unlimited = resources["limits"].get(name).is_none();
        if unlimited && (is_extended(name) || name.starts_with("hugepages-")) && parse(amount).is_some() {
            let what = if is_extended(name) { "non overcommitable resources" } else { "hugepages" };
            causes.required(&path.field("limits").key(name), &format!("Limit must be set for {what}"));
        }
    }
}

fn parse(amount: &Value) -> Option<Quantity> {
    Quantity::parse(amount.as_str()?).ok()
}

/// Checks the name of a resource that a container can have.
pub(super) fn container_name(causes: &mut Causes, path: &Path, name: &str) {
    resource_name(causes, path, name);
}

fn resource_name(causes: &mut Causes, path: &Path, name: &str) {
    let problems = format::qualified_name(name);
    let good = problems.is_empty();
    causes.format(path, name, problems);
    let standard = matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-");
    if good && !standard && !name.contains('/') {
        causes.invalid(path, &name.into(), "must be a standard resource type or fully qualified");
        causes.invalid(path, &name.into(), "must be a standard resource for containers");
    }
}

fn quantity(causes: &mut Causes, path: &Path, name: &str, amount: &Value) {
    let Some(quantity) = parse(amount) else { return };
    if quantity.signum() < 0 {
        causes.invalid(path, amount, "must be greater than or equal to 0");
    }
    if is_extended(name) && !quantity.is_integer() {
        causes.invalid(path, amount, "must be an integer");
    }
}

/// Whether a resource is an extended one: its domain does not belong to Kubernetes.
fn is_extended(name: &str) -> bool {
    name.split_once('/').is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io"))
}
