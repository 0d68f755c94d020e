//! Address families of a service: derives policy, families and cluster IPs from each other. No I/O. Sources:
//! `initIPFamilyFields`, `patchAllocatedValues` and `normalizeClusterIPs` in `pkg/registry/core/service/storage`.

use std::net::IpAddr;

use coracle_kinds::validate::{Cause, service_addresses};
use serde_json::{Value, json};

const SINGLE: &str = "SingleStack";
const PREFER: &str = "PreferDualStack";
const REQUIRE: &str = "RequireDualStack";

/// Keeps cluster IPs that an update omits. If a client changes only `clusterIP`, `clusterIPs` gets the same value.
pub(super) fn synchronize(new: &mut Value, old: Option<&Value>) {
    let has_addresses = |service: &Value| service["spec"]["type"] != "ExternalName";
    let (ip, ips) =
        (|service: &Value| service["spec"]["clusterIP"].as_str().unwrap_or_default().to_owned(), list);
    if let Some(old) = old.filter(|old| has_addresses(old) && has_addresses(new)) {
        if ip(new).is_empty() {
            new["spec"]["clusterIP"] = old["spec"]["clusterIP"].clone();
        }
        if ips(new, "clusterIPs").is_empty() {
            new["spec"]["clusterIPs"] = old["spec"]["clusterIPs"].clone();
        }
    }
    let (before, known) = old.map(|old| (ip(old), ips(old, "clusterIPs"))).unwrap_or_default();
    if !ip(new).is_empty() && ip(new) != before && ips(new, "clusterIPs") == known {
        new["spec"]["clusterIPs"] = json!([ip(new)]);
    }
}

/// Completes policy and families. `cluster` has the families of this cluster, with the default family first. A service
/// keeps its families even if the cluster no longer has them.
pub(super) fn complete(new: &mut Value, old: Option<&Value>, cluster: &[&str]) -> Result<(), Vec<Cause>> {
    if old.is_some_and(|old| is_same_preference(new, old)) {
        return Ok(());
    }
    if policy(new).is_none() {
        new["spec"]["ipFamilyPolicy"] = inferred_policy(new, old).into();
    }
    let invalid = service_addresses(new);
    if !invalid.is_empty() {
        return Err(invalid);
    }
    let mut causes = Vec::new();
    if let Some(old) = old {
        release_secondary(new, old, &mut causes);
    }
    check_single(new, &mut causes);
    infer_families(new, cluster, &mut causes);
    refuse_any(causes)?;
    if has_no_selector(new) && is_headless(new) {
        // Without a selector, the author of the endpoints determines the families of the endpoints.
        add_families(new, cluster, true);
        return Ok(());
    }
    refuse_any(not_configured(new, old, cluster))?;
    add_families(new, cluster, cluster.len() > 1);
    Ok(())
}

/// The policy of a service that sets no policy: single-stack, or dual-stack if the service is headless and has no
/// selector. An update keeps the policy.
fn inferred_policy(new: &Value, old: Option<&Value>) -> String {
    match old.and_then(policy) {
        Some(kept) => kept.to_owned(),
        None if is_headless(new) && has_no_selector(new) => REQUIRE.to_owned(),
        None => SINGLE.to_owned(),
    }
}

/// Removes the second element of unchanged lists if the policy is SingleStack. With another policy, a shorter list is
/// an error.
fn release_secondary(new: &mut Value, old: &Value, causes: &mut Vec<Cause>) {
    let is_single = policy(new) == Some(SINGLE);
    for (field, what) in [("clusterIPs", "cluster IP"), ("ipFamilies", "IP family")] {
        let (now, before) = (list(new, field), list(old, field));
        if is_single && now == before && now.len() > 1 {
            new["spec"][field] = json!([now[0]]);
        } else if !is_single && !now.is_empty() && now.len() < before.len() {
            let detail = format!("must be 'SingleStack' to release the secondary {what}");
            causes.push(invalid("spec.ipFamilyPolicy", &new["spec"]["ipFamilyPolicy"], &detail));
        }
    }
}

fn check_single(new: &Value, causes: &mut Vec<Cause>) {
    for (field, what) in [("clusterIPs", "cluster IPs"), ("ipFamilies", "IP families")] {
        if policy(new) == Some(SINGLE) && list(new, field).len() == 2 {
            let detail =
                format!("must be 'RequireDualStack' or 'PreferDualStack' when multiple {what} are specified");
            causes.push(invalid("spec.ipFamilyPolicy", &new["spec"]["ipFamilyPolicy"], &detail));
        }
    }
}

/// Adds the families of addresses whose family is not listed yet.
fn infer_families(new: &mut Value, cluster: &[&str], causes: &mut Vec<Cause>) {
    let (ips, mut families) = (list(new, "clusterIPs"), list(new, "ipFamilies"));
    let known = families.len();
    for (index, ip) in ips.iter().enumerate().skip(known) {
        let Some(family) = family_of(ip) else { break };
        if cluster.contains(&family) {
            families.push(family.to_owned());
        } else {
            let detail = format!("{family} is not configured on this cluster");
            causes.push(invalid(&format!("spec.clusterIPs[{index}]"), &new["spec"]["clusterIPs"], &detail));
        }
    }
    if families.len() > known {
        new["spec"]["ipFamilies"] = json!(families);
    }
}

/// Errors for requested families that this cluster does not have.
fn not_configured(new: &Value, old: Option<&Value>, cluster: &[&str]) -> Vec<Cause> {
    let families = list(new, "ipFamilies");
    let held = old.filter(|old| old["spec"]["type"] != "ExternalName");
    let held = held.map(|old| list(old, "ipFamilies")).unwrap_or_default();
    let mut causes = Vec::new();
    let keeps_both = families == held && held.len() == 2;
    if policy(new) == Some(REQUIRE) && cluster.len() < 2 && !keeps_both {
        let detail = "this cluster is not configured for dual-stack services";
        causes.push(invalid("spec.ipFamilyPolicy", &new["spec"]["ipFamilyPolicy"], detail));
    }
    for (index, family) in families.iter().enumerate() {
        if !cluster.contains(&family.as_str()) && held.get(index) != Some(family) {
            let field = format!("spec.ipFamilies[{index}]");
            causes.push(invalid(&field, &json!(family), "not configured on this cluster"));
        }
    }
    causes
}

/// Adds the default family. Also adds the other family if the policy requests both families and `may_have_both` is
/// true.
fn add_families(new: &mut Value, cluster: &[&str], may_have_both: bool) {
    let mut families = list(new, "ipFamilies");
    if families.is_empty() {
        families.extend(cluster.first().map(|family| (*family).to_owned()));
    }
    if let ([first], true) = (&families[..], may_have_both && policy(new) != Some(SINGLE)) {
        let other = if first == "IPv4" { "IPv6" } else { "IPv4" };
        families.push(other.to_owned());
    }
    new["spec"]["ipFamilies"] = json!(families);
}

/// Whether both objects have PreferDualStack and unchanged address fields. Such a service keeps its addresses when the
/// cluster gains or loses a family.
fn is_same_preference(new: &Value, old: &Value) -> bool {
    policy(new) == Some(PREFER)
        && policy(old).is_none_or(|policy| policy == PREFER)
        && new["spec"]["type"] == old["spec"]["type"]
        && ["clusterIPs", "ipFamilies"].iter().all(|field| list(new, field) == list(old, field))
}

fn refuse_any(causes: Vec<Cause>) -> Result<(), Vec<Cause>> {
    if causes.is_empty() { Ok(()) } else { Err(causes) }
}

fn invalid(field: &str, value: &Value, detail: &str) -> Cause {
    let message = format!("Invalid value: {value}: {detail}");
    Cause { reason: "FieldValueInvalid", field: field.to_owned(), message }
}

fn policy(service: &Value) -> Option<&str> {
    service["spec"]["ipFamilyPolicy"].as_str()
}

/// A list of strings in the spec.
pub(super) fn list(service: &Value, field: &str) -> Vec<String> {
    let all = service["spec"][field].as_array().into_iter().flatten();
    all.map(|one| one.as_str().unwrap_or_default().to_owned()).collect()
}

fn is_headless(service: &Value) -> bool {
    service["spec"]["clusterIP"] == "None"
}

fn has_no_selector(service: &Value) -> bool {
    service["spec"]["selector"].as_object().is_none_or(serde_json::Map::is_empty)
}

/// The family of an address. `None` for "None".
fn family_of(ip: &str) -> Option<&'static str> {
    let ip: IpAddr = ip.parse().ok()?;
    Some(if ip.is_ipv4() { "IPv4" } else { "IPv6" })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &[&str] = &["IPv4", "IPv6"];
    const ONE: &[&str] = &["IPv4"];

    fn completed(spec: Value, old: Option<&Value>, cluster: &[&str]) -> Result<Value, Vec<String>> {
        let mut new = json!({"spec": spec});
        if new["spec"]["type"].is_null() {
            new["spec"]["type"] = "ClusterIP".into();
        }
        synchronize(&mut new, old);
        match complete(&mut new, old, cluster) {
            Ok(()) => Ok(new),
            Err(causes) => Err(causes.iter().map(|one| format!("{}: {}", one.field, one.message)).collect()),
        }
    }

    fn fields(service: &Value) -> (String, Vec<String>, Vec<String>) {
        (
            policy(service).unwrap_or_default().to_owned(),
            list(service, "ipFamilies"),
            list(service, "clusterIPs"),
        )
    }

    fn families(spec: Value, cluster: &[&str]) -> String {
        let made = completed(spec, None, cluster).unwrap();
        format!("{} {}", policy(&made).unwrap(), list(&made, "ipFamilies").join(","))
    }

    #[test]
    fn a_new_service_gets_the_families_of_its_policy() {
        let selector = json!({"a": "b"});
        for (spec, cluster, expected) in [
            (json!({}), BOTH, "SingleStack IPv4"),
            (json!({}), &["IPv6", "IPv4"], "SingleStack IPv6"),
            (json!({"ipFamilyPolicy": PREFER}), ONE, "PreferDualStack IPv4"),
            (json!({"ipFamilyPolicy": PREFER}), BOTH, "PreferDualStack IPv4,IPv6"),
            (json!({"ipFamilyPolicy": REQUIRE, "ipFamilies": ["IPv6"]}), BOTH, "RequireDualStack IPv6,IPv4"),
            (json!({"ipFamilyPolicy": PREFER, "clusterIP": "fd00::9"}), BOTH, "PreferDualStack IPv6,IPv4"),
            (json!({"clusterIP": "None"}), ONE, "RequireDualStack IPv4,IPv6"),
            (json!({"clusterIP": "None", "selector": selector}), BOTH, "SingleStack IPv4"),
            (
                json!({"clusterIP": "None", "selector": selector, "ipFamilyPolicy": REQUIRE}),
                BOTH,
                "RequireDualStack IPv4,IPv6",
            ),
        ] {
            assert_eq!(families(spec.clone(), cluster), expected, "{spec}");
        }
    }

    #[test]
    fn families_that_the_cluster_does_not_have_are_refused() {
        for (spec, expected) in [
            (json!({"ipFamilyPolicy": REQUIRE}), "this cluster is not configured for dual-stack services"),
            (json!({"ipFamilies": ["IPv6"]}), "spec.ipFamilies[0]: Invalid value: \"IPv6\": not configured"),
            (json!({"clusterIP": "fd00::1"}), "IPv6 is not configured on this cluster"),
            (json!({"ipFamilies": ["IPv4", "IPv6"]}), "when multiple IP families are specified"),
            (
                json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "fd00::1"]}),
                "when multiple cluster IPs",
            ),
            (json!({"clusterIP": "None", "selector": {"a": "b"}, "ipFamilies": ["IPv6"]}), "not configured"),
            (json!({"clusterIPs": ["10.0.0.1"]}), "must be empty when `clusterIP` is not specified"),
        ] {
            let said = completed(spec.clone(), None, ONE).unwrap_err();
            assert!(said.iter().any(|cause| cause.contains(expected)), "{spec}: {said:?}");
        }
    }

    fn stored(policy: &str, families: &[&str], ips: &[&str]) -> Value {
        json!({"spec": {"type": "ClusterIP", "ipFamilyPolicy": policy, "ipFamilies": families,
            "clusterIP": ips[0], "clusterIPs": ips}})
    }

    fn with(old: &Value, change: Value) -> Value {
        let mut spec = old["spec"].clone();
        for (field, value) in change.as_object().unwrap() {
            spec[field] = value.clone();
        }
        spec
    }

    #[test]
    fn a_service_is_upgraded_and_downgraded_by_its_policy() {
        let single = stored(SINGLE, ONE, &["10.0.0.1"]);
        let dual = stored(REQUIRE, BOTH, &["10.0.0.1", "fd00::1"]);
        let up = completed(with(&single, json!({"ipFamilyPolicy": PREFER})), Some(&single), BOTH).unwrap();
        assert_eq!(list(&up, "ipFamilies"), BOTH);
        let down = completed(with(&dual, json!({"ipFamilyPolicy": SINGLE})), Some(&dual), BOTH).unwrap();
        assert_eq!(fields(&down), (SINGLE.into(), vec!["IPv4".into()], vec!["10.0.0.1".into()]));
        let less =
            completed(with(&dual, json!({"clusterIPs": ["10.0.0.1"]})), Some(&dual), BOTH).unwrap_err();
        assert!(less[0].contains("must be 'SingleStack' to release the secondary cluster IP"), "{less:?}");
        let old_client = json!({"clusterIP": "10.0.0.1"});
        assert_eq!(fields(&completed(old_client, Some(&dual), BOTH).unwrap()), fields(&dual));
        let other = completed(json!({"clusterIP": "x"}), Some(&dual), BOTH).unwrap_err();
        assert!(other[0].starts_with("spec.clusterIPs[0]: Invalid value: \"x\": "), "{other:?}");
        let empty = completed(json!({}), Some(&dual), BOTH).unwrap();
        assert_eq!(fields(&empty), fields(&dual), "an update that omits everything");
    }

    #[test]
    fn services_that_prefer_two_families_keep_theirs_when_the_cluster_changes() {
        let before = stored(PREFER, ONE, &["10.0.0.1"]);
        let same = completed(before["spec"].clone(), Some(&before), BOTH).unwrap();
        assert_eq!(fields(&same), fields(&before));
        let dual = stored(REQUIRE, BOTH, &["10.0.0.1", "fd00::1"]);
        let kept = completed(dual["spec"].clone(), Some(&dual), ONE).unwrap();
        assert_eq!(fields(&kept), fields(&dual), "the service keeps its families and addresses");
    }
}
