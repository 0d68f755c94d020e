//! The Pod Security labels of a namespace. Invalid labels are refused. A stricter level causes warnings about the
//! existing pods that violate it.

use std::{
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant},
};

use coracle_kinds::{kind::by_resource, pod_security};
use serde_json::Value;

use super::{Admission, Attributes, Level, LevelVersion, Operation, PodSecurityConfig, Policy};
use crate::{
    cache::prefix_of,
    error::{ApiError, Result},
    offload,
};

/// Maximum number of pods that are checked when a namespace's policy becomes stricter, as upstream.
const MAX_PODS: usize = 3000;
/// Maximum duration of that check, as upstream.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) async fn validate(
    config: &PodSecurityConfig,
    admission: &Admission,
    attributes: &Attributes<'_>,
    namespace: &Value,
) -> Result<()> {
    if !attributes.subresource.is_empty() {
        return Ok(());
    }
    let labels = &namespace["metadata"]["labels"];
    let (new, causes) = Policy::of_labels(labels, config.defaults);
    let before = attributes.old.map(|old| Policy::of_labels(&old["metadata"]["labels"], config.defaults));
    let known = before.as_ref().is_some_and(|(_, known)| *known == causes);
    if !causes.is_empty() && !known {
        return Err(ApiError::invalid(attributes.kind, attributes.name, &causes));
    }
    let is_stricter = match &before {
        None => attributes.operation == Operation::Create,
        Some((old, _)) => is_stricter(new.enforce, old.enforce),
    };
    if !is_stricter {
        return Ok(());
    }
    if config.namespaces.iter().any(|name| name == attributes.name) {
        if !new.is_privileged() && !new.is_equivalent(&config.defaults) {
            attributes.warnings.add(format!(
                "namespace {:?} is exempt from Pod Security, and the policy ({}) will be ignored",
                attributes.name,
                new.labelled(labels)
            ));
        }
    } else if before.is_some() {
        // The check takes up to a second.
        let warn = || warn_about_pods(config, admission, attributes, new.enforce);
        offload::run_long(true, warn).await?;
    }
    Ok(())
}

fn is_stricter(new: LevelVersion, old: LevelVersion) -> bool {
    let relaxed = new.version == old.version && new.level <= old.level;
    new != old && new.level != Level::Privileged && !relaxed
}

/// Adds one warning for each group of pods with the same violations.
fn warn_about_pods(
    config: &PodSecurityConfig,
    admission: &Admission,
    attributes: &Attributes<'_>,
    enforce: LevelVersion,
) {
    let pods = pods(config, admission, attributes.name);
    let (found, checked) = check(&pods, enforce, Instant::now() + CHECK_TIMEOUT);
    if checked < pods.len() {
        attributes.warnings.add(format!(
            "new PodSecurity enforce level only checked against the first {checked} of {} existing pods",
            pods.len()
        ));
    }
    if !found.is_empty() {
        attributes.warnings.add(format!(
            "existing pods in namespace {:?} violate the new PodSecurity enforce level \"{enforce}\"",
            attributes.name
        ));
    }
    let mut lines: Vec<String> = found.into_iter().map(|(reasons, names)| line(&reasons, &names)).collect();
    lines.sort();
    lines.into_iter().for_each(|line| attributes.warnings.add(line));
}

/// The names of pods by their violations, and the number of checked pods.
fn check(pods: &[Value], enforce: LevelVersion, deadline: Instant) -> (BTreeMap<String, Vec<&str>>, usize) {
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut checked = 0;
    for pod in pods.iter().take(MAX_PODS) {
        let violations = pod_security::evaluate(enforce, &pod["metadata"], &pod["spec"]);
        if !violations.is_empty() {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            found.entry(pod_security::reasons(&violations)).or_default().push(name);
        }
        checked += 1;
        if Instant::now() > deadline {
            break;
        }
    }
    (found, checked)
}

fn line(reasons: &str, names: &[&str]) -> String {
    let first = names.iter().min().copied().unwrap_or_default();
    match names.len() {
        0 | 1 => format!("{first}: {reasons}"),
        2 => format!("{first} (and 1 other pod): {reasons}"),
        count => format!("{first} (and {} other pods): {reasons}", count - 1),
    }
}

/// The pods of a namespace: first one pod of each controller and all pods without a controller, then the others.
fn pods(config: &PodSecurityConfig, admission: &Admission, namespace: &str) -> Vec<Value> {
    let Some(kind) = by_resource("", "v1", "pods") else { return Vec::new() };
    let Ok(objects) = admission
        .cache
        .of(kind)
        .map(|all| all.lock().under(&prefix_of(kind, namespace)).cloned().collect::<Vec<_>>())
    else {
        return Vec::new();
    };
    let mut controllers = HashSet::new();
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    for pod in objects.iter().map(|object| object.value()) {
        let class = pod["spec"]["runtimeClassName"].as_str().unwrap_or_default();
        if !class.is_empty() && config.runtime_classes.iter().any(|exempt| exempt == class) {
            continue;
        }
        let owners = pod["metadata"]["ownerReferences"].as_array().into_iter().flatten();
        let controller =
            owners.filter(|owner| owner["controller"] == true).find_map(|owner| owner["uid"].as_str());
        if controller.is_none_or(|uid| controllers.insert(uid.to_owned())) {
            first.push(pod);
        } else {
            rest.push(pod);
        }
    }
    first.extend(rest);
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_counts_the_pods_that_share_it() {
        assert_eq!(line("privileged", &["a"]), "a: privileged");
        assert_eq!(line("privileged", &["b", "a"]), "a (and 1 other pod): privileged");
        assert_eq!(line("privileged", &["b", "a", "c"]), "a (and 2 other pods): privileged");
    }

    #[test]
    fn a_limited_number_of_pods_is_checked_in_a_limited_time() {
        let pod = serde_json::json!({"metadata": {"name": "p"}, "spec": {"hostNetwork": true}});
        let pods = vec![pod; MAX_PODS + 10];
        let enforce = LevelVersion { level: Level::Baseline, version: pod_security::Version::Latest };
        let (found, checked) = check(&pods, enforce, Instant::now() + Duration::from_secs(600));
        assert_eq!((found.len(), checked), (1, MAX_PODS));
        let (_, checked) = check(&pods, enforce, Instant::now());
        assert!(checked < MAX_PODS, "{checked}");
    }
}
