//! Cluster IPs and address families of a Service. Sources: `ValidateServiceClusterIPsRelatedFields`,
//! `validateUpgradeDowngradeClusterIPs`, `validateUpgradeDowngradeIPFamilies`.

use std::collections::HashSet;
use std::net::IpAddr;

use serde_json::Value;

use crate::cause::{Cause, Causes, Path};
use crate::validate::format;
use crate::validate::value::{items, text};

const FAMILIES: &[&str] = &["IPv4", "IPv6"];
const POLICIES: &[&str] = &["PreferDualStack", "RequireDualStack", "SingleStack"];
/// Maximum number of cluster IPs: one of each family.
const MAX_FAMILIES: usize = 2;

/// Violations in the cluster IPs, families and policy of a Service. The API server calls this before it allocates
/// addresses.
#[must_use]
pub fn service_addresses(service: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    if service["spec"]["type"] != "ExternalName" {
        check(&mut causes, &service["spec"]);
    }
    causes.into_list()
}

pub(super) fn check(causes: &mut Causes, spec: &Value) {
    let path = Path::root("spec");
    let (here, all) = (path.field("clusterIPs"), &spec["clusterIPs"]);
    let count = items(all).count();
    match (text(&spec["clusterIP"]), count) {
        ("", 0) => {}
        ("", _) => causes.invalid(&here, all, "must be empty when `clusterIP` is not specified"),
        (_, 0) => causes.required(&here, ""),
        (first, _) if text(&all[0]) != first => {
            causes.invalid(&here, all, "first value must match `clusterIP`");
        }
        _ => {}
    }
    families(causes, &path.field("ipFamilies"), &spec["ipFamilies"]);
    causes.optional_word(&path.field("ipFamilyPolicy"), &spec["ipFamilyPolicy"], POLICIES);
    let before = causes.count();
    for (index, ip) in items(all) {
        let ip = text(ip);
        if (index, ip) != (0, "None") {
            causes.format(&here.index(index), ip, format::ip(ip));
        } else if count > 1 {
            causes.invalid(&here, all, "'None' must be the first and only value");
        }
    }
    let are_valid = causes.count() == before;
    if count > MAX_FAMILIES {
        causes.invalid(&here, all, "may only hold up to 2 values");
    }
    if are_valid {
        addresses(causes, &here, spec);
    }
}

fn families(causes: &mut Causes, path: &Path, families: &Value) {
    let mut seen = HashSet::new();
    for (index, family) in items(families) {
        let here = path.index(index);
        if !FAMILIES.contains(&text(family)) {
            causes.unsupported(&here, family, FAMILIES);
        }
        if !seen.insert(text(family)) {
            causes.duplicate(&here, family);
        }
    }
}

/// Checks that valid addresses have one family each, in the order of the families.
fn addresses(causes: &mut Causes, path: &Path, spec: &Value) {
    let all = &spec["clusterIPs"];
    let parsed: Vec<IpAddr> = items(all).filter_map(|(_, ip)| text(ip).parse().ok()).collect();
    if let [first, rest @ ..] = &parsed[..]
        && rest.iter().any(|ip| ip.is_ipv4() == first.is_ipv4())
    {
        causes.invalid(path, all, "may specify no more than one IP for each IP family");
    }
    for (index, (ip, (_, family))) in parsed.iter().zip(items(&spec["ipFamilies"])).enumerate() {
        let family = text(family);
        if FAMILIES.contains(&family) && family != family_of(*ip) {
            let detail = format!("expected an {family} value as indicated by `ipFamilies[{index}]`");
            causes.invalid(&path.index(index), &all[index], &detail);
        }
    }
}

fn family_of(ip: IpAddr) -> &'static str {
    if ip.is_ipv4() { "IPv4" } else { "IPv6" }
}

/// Checks that an update keeps the primary address and family. It may release the secondary address and family only if
/// the new policy is `SingleStack`.
pub(super) fn check_update(causes: &mut Causes, new: &Value, old: &Value) {
    if [new, old].iter().any(|spec| spec["type"] == "ExternalName") {
        return;
    }
    let (was_headless, is_headless) = (is_headless(old), is_headless(new));
    if was_headless && is_headless {
        return;
    }
    Released { field: "clusterIPs", name: "clusterIP" }.check(causes, new, old);
    if was_headless == is_headless {
        Released { field: "ipFamilies", name: "ipFamily" }.check(causes, new, old);
    }
}

/// Checks a list whose first element is immutable. The second element may be added or removed.
struct Released {
    field: &'static str,
    name: &'static str,
}

impl Released {
    fn check(&self, causes: &mut Causes, new: &Value, old: &Value) {
        let path = Path::root("spec");
        let (here, now) = (path.field(self.field).index(0), &new[self.field]);
        let values = |spec: &Value| items(&spec[self.field]).map(|(_, one)| one.clone()).collect::<Vec<_>>();
        let (was, is) = (values(old), values(new));
        let Some(first) = was.first() else { return };
        if is.is_empty() {
            causes.invalid(&here, now, &format!("primary {} can not be unset", self.name));
            return;
        }
        if is.first() != Some(first) {
            causes.invalid(&here, now, "may not change once set");
        }
        if was.len() == is.len() {
            for (index, (one, other)) in was.iter().zip(&is).enumerate().skip(1) {
                if one != other {
                    // As upstream, an error in any family has the path of the first family.
                    let index = if self.field == "ipFamilies" { 0 } else { index };
                    causes.invalid(&path.field(self.field).index(index), now, "may not change once set");
                }
            }
        }
        if is.len() < was.len() && is.len() == 1 && new["ipFamilyPolicy"] != "SingleStack" {
            let detail = format!("must be set to 'SingleStack' when releasing the secondary {}", self.name);
            causes.invalid(&path.field("ipFamilyPolicy"), &new["ipFamilyPolicy"], &detail);
        }
    }
}

fn is_headless(spec: &Value) -> bool {
    spec["clusterIP"] == "None"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn said(spec: Value) -> Vec<String> {
        let all = service_addresses(&json!({"spec": spec}));
        all.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
    }

    #[test]
    fn addresses_agree_with_their_families() {
        let (v4, v6) = ("10.0.0.1", "fd00::1");
        let good = json!({"clusterIP": v6, "clusterIPs": [v6, v4], "ipFamilies": ["IPv6", "IPv4"],
            "ipFamilyPolicy": "RequireDualStack"});
        assert!(said(good).is_empty() && said(json!({})).is_empty());
        assert!(
            said(json!({"clusterIP": "None", "clusterIPs": ["None"], "ipFamilies": ["IPv6", "IPv4"]}))
                .is_empty()
        );
        for (spec, expected) in [
            (json!({"clusterIP": v4}), "spec.clusterIPs: Required value"),
            (json!({"clusterIPs": [v4]}), "must be empty when `clusterIP` is not specified"),
            (json!({"clusterIP": v4, "clusterIPs": [v6]}), "first value must match `clusterIP`"),
            (
                json!({"clusterIP": v4, "clusterIPs": [v4, "10.0.0.2"]}),
                "no more than one IP for each IP family",
            ),
            (
                json!({"clusterIP": "None", "clusterIPs": ["None", v4]}),
                "'None' must be the first and only value",
            ),
            (json!({"clusterIP": v4, "clusterIPs": [v4, v6, v6]}), "up to 2 values"),
            (json!({"clusterIP": v4, "clusterIPs": [v4, "x"]}), "spec.clusterIPs[1]: "),
            (
                json!({"clusterIP": v4, "clusterIPs": [v4], "ipFamilies": ["IPv6"]}),
                "spec.clusterIPs[0]: Invalid value: \"10.0.0.1\": expected an IPv6 value as indicated by `ipFamilies[0]`",
            ),
            (json!({"ipFamilies": ["IPv4", "IPv4"]}), "spec.ipFamilies[1]: Duplicate value"),
            (json!({"ipFamilies": ["IPv5"]}), "spec.ipFamilies[0]: Unsupported value"),
            (json!({"ipFamilyPolicy": "Dual"}), "spec.ipFamilyPolicy: Unsupported value"),
        ] {
            let causes = said(spec.clone());
            assert!(causes.iter().any(|cause| cause.contains(expected)), "{spec}: {causes:?}");
        }
    }

    #[test]
    fn an_update_keeps_the_primary_address_and_releases_the_secondary_by_policy() {
        let spec = |ips: &[&str], policy: &str| {
            let families: Vec<_> =
                ips.iter().map(|ip| if ip.contains(':') { "IPv6" } else { "IPv4" }).collect();
            json!({"clusterIP": ips.first(), "clusterIPs": ips, "ipFamilies": families, "ipFamilyPolicy": policy})
        };
        let count = |new: &Value, old: &Value| {
            let mut causes = Causes::default();
            check_update(&mut causes, new, old);
            causes.count()
        };
        let (one, two) =
            (spec(&["10.0.0.1"], "SingleStack"), spec(&["10.0.0.1", "fd00::1"], "PreferDualStack"));
        assert_eq!((count(&two, &one), count(&one, &two), count(&two, &two)), (0, 0, 0));
        assert_eq!(count(&spec(&["10.0.0.1"], "PreferDualStack"), &two), 2, "the address and the family");
        assert_eq!(count(&spec(&["10.0.0.2"], "SingleStack"), &one), 1);
        assert_eq!(count(&spec(&["10.0.0.1", "fd00::2"], "PreferDualStack"), &two), 1);
        assert_eq!(count(&spec(&["fd00::1", "10.0.0.1"], "PreferDualStack"), &two), 4);
        let headless =
            |families: Value| json!({"clusterIP": "None", "clusterIPs": ["None"], "ipFamilies": families});
        assert_eq!(count(&headless(json!(["IPv6"])), &headless(json!(["IPv4", "IPv6"]))), 0);
        assert_eq!(count(&headless(json!(["IPv4"])), &one), 1);
    }
}
