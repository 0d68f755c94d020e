//! Volumes and claims: times of phases, and the two fields of a claim's data source.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

const TRANSITION: &str = "lastPhaseTransitionTime";

/// The status of a new volume.
pub(crate) fn new_volume(volume: &mut Value) {
    volume["status"] = json!({"phase": "Pending", TRANSITION: now()});
}

/// The status of a new claim, and its data source in both fields.
pub(crate) fn new_claim(claim: &mut Value) {
    claim["status"] = json!({"phase": "Pending"});
    drop_data_sources(claim, None);
    normalize_data_sources(claim);
}

/// Sets the time of a volume's last phase, unless the client has set it. Source:
/// `persistentvolumeStatusStrategy.PrepareForUpdate`.
pub(super) fn set_transition_time(new: &mut Value, old: &Value) {
    let before = &old["status"][TRANSITION];
    let is_new_phase = new["status"]["phase"] != old["status"]["phase"];
    let Some(status) = new["status"].as_object_mut() else { return };
    let given = status.get(TRANSITION).filter(|time| !time.is_null());
    if is_new_phase && given.is_none_or(|time| time == before) {
        status.insert(TRANSITION.to_owned(), now().into());
    } else if given.is_none() && !before.is_null() {
        status.insert(TRANSITION.to_owned(), before.clone());
    }
}

/// Removes unsupported data sources. A source in another namespace is unsupported, because the gate
/// `CrossNamespaceVolumeDataSource` is off. A `dataSource` without a `dataSourceRef` must be a claim or a snapshot.
/// Data sources that the old claim has stay. Sources: `DropDisabledFields`, `EnforceDataSourceBackwardsCompatibility`
/// of `pkg/api/persistentvolumeclaim`.
pub(super) fn drop_data_sources(claim: &mut Value, old: Option<&Value>) {
    const REFERENCE: &str = "dataSourceRef";
    let had = |field: &str| old.is_some_and(|old| old["spec"][field].is_object());
    let Some(spec) = claim.get_mut("spec").and_then(Value::as_object_mut) else { return };
    let namespace = spec.get(REFERENCE).and_then(|reference| reference["namespace"].as_str());
    if !had(REFERENCE) && namespace.is_some_and(|namespace| !namespace.is_empty()) {
        spec.remove(REFERENCE);
    }
    let has_reference = spec.get(REFERENCE).is_some_and(Value::is_object);
    let had_source = had("dataSource") || had(REFERENCE);
    if !had_source && !has_reference && !spec.get("dataSource").is_some_and(is_old_source) {
        spec.remove("dataSource");
    }
}

/// Whether a data source is a claim or a snapshot. `dataSource` supports only these kinds.
fn is_old_source(source: &Value) -> bool {
    matches!(
        (source["apiGroup"].as_str().unwrap_or_default(), source["kind"].as_str()),
        ("", Some("PersistentVolumeClaim")) | ("snapshot.storage.k8s.io", Some("VolumeSnapshot"))
    )
}

/// Sets `dataSource` from `dataSourceRef`, and vice versa, if one of them is absent. A source in another namespace is
/// only in `dataSourceRef`. Source: `NormalizeDataSources`.
pub(crate) fn normalize_data_sources(claim: &mut Value) {
    let Some(spec) = claim["spec"].as_object_mut() else { return };
    let present = |spec: &Map<String, Value>, name: &str| spec.get(name).filter(|of| of.is_object()).cloned();
    match (present(spec, "dataSource"), present(spec, "dataSourceRef")) {
        (Some(source), None) => spec.insert("dataSourceRef".to_owned(), source),
        (None, Some(source)) if source["namespace"].as_str().unwrap_or_default().is_empty() => {
            let mut source = source;
            if let Some(source) = source.as_object_mut() {
                source.remove("namespace");
            }
            spec.insert("dataSource".to_owned(), source)
        }
        _ => None,
    };
}

/// The current time in the format of the API.
pub(super) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_fields_of_a_claim_have_its_data_source() {
        let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"});
        let other = json!({"kind": "VolumeSnapshot", "name": "s", "namespace": "n"});
        let cases = [
            (json!({"dataSource": source}), json!({"dataSource": source, "dataSourceRef": source})),
            (json!({"dataSourceRef": source}), json!({"dataSource": source, "dataSourceRef": source})),
            (json!({"dataSourceRef": other}), json!({"dataSourceRef": other})),
            (json!({}), json!({})),
        ];
        for (spec, expect) in cases {
            let mut claim = json!({"spec": spec});
            normalize_data_sources(&mut claim);
            assert_eq!(claim["spec"], expect);
        }
    }

    #[test]
    fn data_sources_that_are_not_supported_are_removed() {
        let snapshot = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"});
        let other = json!({"apiGroup": "a.b", "kind": "Other", "name": "o"});
        let away = json!({"kind": "PersistentVolumeClaim", "name": "c", "namespace": "n"});
        for (spec, expect) in [
            (json!({"dataSource": snapshot}), json!({"dataSource": snapshot, "dataSourceRef": snapshot})),
            (json!({"dataSource": other}), json!({})),
            (json!({"dataSourceRef": other}), json!({"dataSource": other, "dataSourceRef": other})),
            (json!({"dataSourceRef": away}), json!({})),
        ] {
            let mut claim = json!({"spec": spec});
            new_claim(&mut claim);
            assert_eq!(claim["spec"], expect);
        }
        let mut claim = json!({"spec": {"dataSourceRef": away, "dataSource": other}});
        let old = claim.clone();
        drop_data_sources(&mut claim, Some(&old));
        assert_eq!(claim, old);
    }

    #[test]
    fn a_new_phase_of_a_volume_has_a_time() {
        let mut volume = json!({"spec": {}});
        new_volume(&mut volume);
        assert!(volume["status"][TRANSITION].as_str().unwrap().parse::<Timestamp>().is_ok(), "{volume}");
        let before = "2020-01-01T00:00:00Z";
        let old = json!({"status": {"phase": "Pending", TRANSITION: before}});
        let own = "2021-01-01T00:00:00Z";
        for (status, expect) in [
            (json!({"phase": "Pending"}), Some(before)),
            (json!({"phase": "Pending", TRANSITION: own}), Some(own)),
            (json!({"phase": "Bound", TRANSITION: own}), Some(own)),
            (json!({"phase": "Bound", TRANSITION: before}), None),
            (json!({"phase": "Bound"}), None),
        ] {
            let mut new = json!({"status": status});
            set_transition_time(&mut new, &old);
            let time = new["status"][TRANSITION].as_str().unwrap();
            // `None` expects the current time.
            assert!(expect.map_or(time > own, |expect| time == expect), "{new}");
        }
    }
}
