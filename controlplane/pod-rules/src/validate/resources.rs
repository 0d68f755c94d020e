//! Requests and limits of containers, and pod-level requests and limits.

use serde_json::Value;

use super::{Causes, Path, entries, format, standard_resource};
use crate::pod_level;
use coracle_values::Quantity;

/// Checks `resources` of a container.
pub(super) fn container(causes: &mut Causes, path: &Path, resources: &Value) {
    requirements(causes, path, resources, resource_name);
}

/// Checks the overhead of a pod or of a RuntimeClass. The rules are the same as for a container's limits.
pub fn overhead(causes: &mut Causes, path: &Path, amounts: &Value) {
    if !amounts.is_null() {
        container(causes, path, &serde_json::json!({"limits": amounts}));
    }
}

/// Checks pod-level resources. Source: `validatePodResources`.
pub(super) fn pod(causes: &mut Causes, path: &Path, spec: &Value) {
    let (path, resources) = (path.field("resources"), &spec["resources"]);
    if !resources.is_object() {
        return;
    }
    if spec["os"]["name"] == "windows" {
        return causes.forbidden(&path, "may not be set for a windows pod");
    }
    if resources["claims"].is_array() {
        causes.forbidden(&path.field("claims"), "claims may not be set for Resources at pod-level");
    }
    requirements(causes, &path, resources, |causes, path, name| {
        let before = causes.count();
        standard_name(causes, path, name);
        if causes.count() == before && !pod_level::is_supported(name) {
            causes.unsupported(path, &name.into(), &["cpu", "memory"]);
        }
    });
    for list in ["requests", "limits"] {
        for (name, sum) in pod_level::sum(spec, list) {
            let whole = &resources[list][&name];
            let counts = list == "requests" || pod_level::is_huge_pages(&name);
            if counts && parse(whole).is_some_and(|whole| sum > whole) {
                let detail = format!("must be greater than or equal to aggregate container {list} of {sum}");
                causes.invalid(&path.field(list).key(&name), whole, &detail);
            }
        }
    }
    for (index, container) in super::items(&spec["containers"]) {
        for (name, limit) in entries(&container["resources"]["limits"]) {
            let whole = &resources["limits"][name];
            if let (Some(own), Some(most)) = (parse(limit), parse(whole))
                && own > most
            {
                let here = path.field("containers").index(index).key(name).field("limits");
                causes.invalid(&here, limit, &format!("must be less than or equal to pod limits of {most}"));
            }
        }
    }
}

/// Checks limits and requests. `rule` checks the resource names. Source: `validateResourceRequirements`.
fn requirements(causes: &mut Causes, path: &Path, resources: &Value, rule: fn(&mut Causes, &Path, &str)) {
    let (mut has_common, mut has_huge) = (false, false);
    for list in ["limits", "requests"] {
        for (name, amount) in entries(&resources[list]) {
            let here = path.field(list).key(name);
            rule(causes, &here, name);
            quantity(causes, &here, name, amount);
            if pod_level::is_huge_pages(name) {
                huge_pages(causes, &here, name, amount);
            }
            has_common |= matches!(name.as_str(), "cpu" | "memory");
            has_huge |= pod_level::is_huge_pages(name);
        }
    }
    for (name, amount) in entries(&resources["requests"]) {
        let (request, limit) = (parse(amount), parse(&resources["limits"][name]));
        match (request, limit) {
            (Some(request), Some(limit)) if is_exact(name) && request != limit => {
                let detail = format!("must be equal to {name} limit of {limit}");
                causes.invalid(&path.field("requests"), amount, &detail);
            }
            (Some(request), Some(limit)) if request > limit => {
                let detail = format!("must be less than or equal to {name} limit of {limit}");
                causes.invalid(&path.field("requests"), amount, &detail);
            }
            (Some(_), None) if is_exact(name) => {
                causes.required(&path.field("limits"), "Limit must be set for non overcommitable resources");
            }
            _ => {}
        }
    }
    if has_huge && !has_common {
        causes.forbidden(path, "HugePages require cpu or memory");
    }
}

/// Whether a request must equal its limit. Source: `IsOvercommitAllowed`.
pub fn is_exact(name: &str) -> bool {
    let is_native = !name.contains('/') || name.contains("kubernetes.io/");
    !is_native || pod_level::is_huge_pages(name)
}

/// Checks that an amount of huge pages is a whole number of pages.
fn huge_pages(causes: &mut Causes, path: &Path, name: &str, amount: &Value) {
    let page = name.strip_prefix("hugepages-").and_then(|size| Quantity::parse(size).ok());
    let (Some(page), Some(amount_of)) = (page, parse(amount)) else { return };
    if page.value() > 0 && amount_of.value() % page.value() != 0 {
        let detail = format!("{amount_of} is not positive integer multiple of {name}");
        causes.invalid(path, amount, &detail);
    }
}

fn parse(amount: &Value) -> Option<Quantity> {
    Quantity::parse(amount.as_str()?).ok()
}

/// Checks the name of a resource that a container can have.
pub fn container_name(causes: &mut Causes, path: &Path, name: &str) {
    resource_name(causes, path, name);
}

fn resource_name(causes: &mut Causes, path: &Path, name: &str) {
    standard_name(causes, path, name);
    if !name.contains('/') {
        if !is_container_name(name) {
            causes.invalid(path, &name.into(), "must be a standard resource for containers");
        }
    } else if !name.contains("kubernetes.io/") && !is_extended_name(name) {
        causes.invalid(path, &name.into(), "doesn't follow extended resource name standard");
    }
}

/// Checks a resource name by the general rule. Source: `validateResourceName`.
pub fn standard_name(causes: &mut Causes, path: &Path, name: &str) {
    let problems = format::qualified_name(name);
    let good = problems.is_empty();
    causes.format(path, name, problems);
    if good && !name.contains('/') && !is_standard(name) {
        causes.invalid(path, &name.into(), "must be a standard resource type or fully qualified");
    }
}

fn is_container_name(name: &str) -> bool {
    matches!(name, "cpu" | "memory" | "ephemeral-storage") || pod_level::is_huge_pages(name)
}

/// Names of resources that have no domain. Source: `standardResources` of `core/helper`.
fn is_standard(name: &str) -> bool {
    name == "storage" || standard_resource::is_standard(name)
}

/// Whether a name with a domain is the name of an extended resource. Source: `IsExtendedResourceName`.
fn is_extended_name(name: &str) -> bool {
    !name.starts_with("requests.") && format::qualified_name(&format!("requests.{name}")).is_empty()
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

/// Whether a resource is an extended resource: its domain does not belong to Kubernetes.
fn is_extended(name: &str) -> bool {
    name.split_once('/').is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io"))
}
