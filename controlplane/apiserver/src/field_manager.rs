//! Field managers of writes: their names, and the fields that they own (`metadata.managedFields`).

mod served_versions;

use coracle_kinds::{
    Resource, strategy,
    validate::{Causes, Path},
};
use coracle_managed_fields::{
    ApplyError, ApplyRequest, FieldSet, Managers, PathElement, UpdateRequest, Updater, conflict_message,
};
use serde_json::{Map, Value, json};

use self::served_versions::ServedVersions;
use crate::{
    call::Call,
    error::{ApiError, Result},
    object_meta::{metadata_mut, now, text},
};

/// Maximum bytes of a manager's name. Source: `validation.FieldManagerMaxLength`.
const MAX_NAME: usize = 128;

/// The kind of a write request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// The writer owns the fields that it changes.
    Update,
    /// Server-side apply: `managedFields` of the new object are already computed.
    Apply,
}

/// The name of the manager: the parameter `fieldManager`, or else the program in the user agent. The components of this
/// process send no user agent.
pub(crate) fn name(call: &Call) -> String {
    let given = call.info.query.get("fieldManager");
    if !given.is_empty() {
        return given.to_owned();
    }
    let Some(agent) = call.headers.get(http::header::USER_AGENT) else {
        return component(&call.user.name).to_owned();
    };
    program(agent.as_bytes())
}

/// The program in a user agent: the printable characters before the first slash, at most [`MAX_NAME`] bytes. Each byte
/// that is not UTF-8 becomes a replacement character. Source: `prefixFromUserAgent` of `k8s.io/apiserver`.
fn program(agent: &[u8]) -> String {
    let start = agent.split(|byte| *byte == b'/').next().unwrap_or_default();
    let mut program = String::new();
    for chunk in start.utf8_chunks() {
        let invalid = chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER);
        for letter in chunk.valid().chars().chain(invalid).filter(|letter| is_printable(*letter)) {
            if program.len() + letter.len_utf8() > MAX_NAME {
                return program;
            }
            program.push(letter);
        }
    }
    program
}

/// Whether Go's `unicode.IsPrint` accepts a character: a letter, mark, number, punctuation, symbol or the ASCII space.
fn is_printable(letter: char) -> bool {
    if letter.is_ascii() {
        return !letter.is_ascii_control();
    }
    // Debug output escapes the other categories. It also escapes a mark, but only as the first character.
    !format!("a{letter}").escape_debug().any(|escaped| escaped == '\\')
}

/// Upstream's name of the program of a component. Empty for other users.
fn component(user: &str) -> &str {
    match user {
        "system:apiserver" => "kube-apiserver",
        "system:kube-controller-manager" => "kube-controller-manager",
        "system:kube-scheduler" => "kube-scheduler",
        user if user.starts_with("system:node:") => "kubelet",
        _ => "",
    }
}

/// Checks the parameters `fieldManager` and `force`.
pub(crate) fn check_parameters(call: &Call, is_apply: bool) -> Result<()> {
    let (name, force) = (call.info.query.get("fieldManager"), call.info.query.has("force"));
    let (path, mut causes) = (Path::root("fieldManager"), Causes::default());
    if name.len() > MAX_NAME {
        causes.too_long(&path, MAX_NAME);
    } else if let Some((at, bad)) = name.char_indices().find(|(_, letter)| !is_printable(*letter)) {
        let why = format!("invalid character U+{:04X} (at position {at})", u32::from(bad));
        causes.invalid(&path, &name.into(), &why);
    }
    if is_apply && name.is_empty() {
        causes.required(&path, "is required for apply patch");
    }
    if !is_apply && force {
        causes.forbidden(&Path::root("force"), "may not be specified for non-apply patch");
    }
    if causes.is_empty() { Ok(()) } else { Err(call.invalid_parameter(|list| *list = causes)) }
}

/// Records the owner of a new object's fields.
pub(crate) fn record_create(call: &Call, object: &mut Value) {
    let live = json!({"apiVersion": object["apiVersion"], "kind": object["kind"]});
    let managers = updated(call, &live, object, Managers::default());
    set(object, &managers);
}

/// Records the owner of the fields that an update changed. `requested` is the `managedFields` of the request, which is
/// ignored for subresources. An empty list, or a list with one empty entry, clears the field.
pub(crate) fn record_update(call: &Call, old: &Value, new: &mut Value, requested: Option<&Value>) {
    let stored = || Managers::from_json(&old["metadata"]["managedFields"]).unwrap_or_default();
    let managers = match requested {
        Some(entries) if call.resource.subresource.is_empty() => {
            if is_reset(entries) {
                Managers::default()
            } else {
                Managers::from_json(entries)
                    .ok()
                    .filter(|managers| !managers.is_empty())
                    .unwrap_or_else(stored)
            }
        }
        _ => stored(),
    };
    let managers = updated(call, old, new, managers);
    set(new, &managers);
}

/// Merges an applied configuration into an object, with `managedFields`.
pub(crate) fn apply(call: &Call, live: &Value, config: &Value) -> Result<Value> {
    let managers = Managers::from_json(&live["metadata"]["managedFields"])
        .map_err(|error| ApiError::internal(format!("failed to decode managed fields: {error}")))?;
    let manager = name(call);
    let reduced = (call.resource.subresource == "resize").then(|| resizable(config));
    let config = reduced.as_ref().unwrap_or(config);
    let request = ApplyRequest { live, config, manager: &manager, force: call.info.query.flag("force") };
    let earlier = keeps_times(call).then(|| managers.clone());
    let applied = with_updater(call, |updater| updater.apply(request, managers));
    let applied = applied.map_err(|error| failure(call, config, &error))?;
    let mut object = applied.object;
    set(&mut object, &with_kept_times(applied.managers, earlier));
    Ok(object)
}

/// The part of a pod's configuration that a resize can set. Source: `ResizeStrategy` of the pod's registry.
fn resizable(config: &Value) -> Value {
    let keep = |value: &Value, fields: &[&str]| {
        let mut map = value.as_object().cloned().unwrap_or_default();
        map.retain(|field, _| fields.contains(&field.as_str()));
        map
    };
    let mut spec = keep(&config["spec"], &["containers", "initContainers", "resources"]);
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            *container = keep(container, &["name", "resources", "resizePolicy"]).into();
        }
    }
    let mut reduced = keep(config, &["apiVersion", "kind"]);
    reduced.insert("metadata".to_owned(), keep(&config["metadata"], &["name", "namespace", "uid"]).into());
    reduced.insert("spec".to_owned(), spec.into());
    reduced.into()
}

fn updated(call: &Call, live: &Value, new: &Value, managers: Managers) -> Managers {
    let manager = name(call);
    let request = UpdateRequest { live, new, manager: &manager };
    let earlier = keeps_times(call).then(|| managers.clone());
    let updated = with_updater(call, |updater| updater.update(request, managers));
    with_kept_times(updated, earlier)
}

/// Whether the write keeps the times of the managers' earlier entries. Source: `ScaleHandler.ToParent` of
/// `managedfields`, which takes the times from the entries of the workload before the write.
fn keeps_times(call: &Call) -> bool {
    call.resource.subresource == "scale"
}

fn with_kept_times(managers: Managers, earlier: Option<Managers>) -> Managers {
    match earlier {
        Some(earlier) => managers.with_times_of(&earlier),
        None => managers,
    }
}

fn with_updater<T>(call: &Call, act: impl FnOnce(&Updater<'_, ServedVersions<'_>>) -> T) -> T {
    let versions = ServedVersions::new(&call.kind, call.state.registry.load());
    let ignored = ignored(call);
    let updater = Updater {
        versions: &versions,
        api_version: call.kind.api_version(),
        subresource: &call.resource.subresource,
        ignored: &ignored,
        now: &now(),
    };
    act(&updater)
}

/// The fields that a request for this subresource cannot set.
fn ignored(call: &Call) -> FieldSet {
    let mut fields = FieldSet::default();
    for path in strategy::reset_fields(&call.kind, &call.resource.subresource) {
        let path: Vec<PathElement> = path.iter().map(|name| PathElement::field(name)).collect();
        fields.insert(&path);
    }
    fields
}

fn is_reset(entries: &Value) -> bool {
    match entries.as_array().map(Vec::as_slice) {
        Some([]) => true,
        Some([only]) => only.as_object().is_some_and(Map::is_empty),
        _ => false,
    }
}

/// Sets `managedFields`, or removes them when no manager owns a field.
fn set(object: &mut Value, managers: &Managers) {
    let entries = managers.to_json();
    let Some(metadata) = metadata_mut(object) else { return };
    if entries.is_null() {
        metadata.remove("managedFields");
    } else {
        metadata.insert("managedFields".to_owned(), entries);
    }
}

fn failure(call: &Call, config: &Value, error: &ApplyError) -> ApiError {
    match error {
        ApplyError::Conflicts(conflicts) => {
            let mut failure = ApiError::apply_conflict(conflict_message(conflicts));
            let causes = conflicts.listed().into_iter().map(|conflict| {
                json!({"reason": "FieldManagerConflict", "message": conflict.cause(), "field": conflict.path.to_string()})
            });
            failure.details = json!({"causes": causes.collect::<Vec<_>>()});
            failure
        }
        ApplyError::Invalid(_) => not_typed(&call.kind, config, error),
        ApplyError::Version(_) => ApiError::bad_request(error.to_string()),
    }
}

/// The error of a configuration that does not fit the schema. Source: `structuredMergeManager.Apply` and `objectGVKNN`.
pub(crate) fn not_typed(kind: &Resource, config: &Value, problem: impl std::fmt::Display) -> ApiError {
    let slash = if kind.group.is_empty() { "/" } else { "" };
    let (namespace, name) = (text(config, "namespace"), text(config, "name"));
    let object = format!("{namespace}/{name}; {slash}{}, Kind={}", kind.api_version(), kind.kind);
    ApiError::of_apply(format!("failed to create typed patch object ({object}): {problem}"))
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_resource;

    use super::*;

    #[test]
    fn components_have_the_names_of_upstreams_programs() {
        let controllers = crate::authn::User::controllers();
        assert_eq!(component(&controllers.name), "kube-controller-manager");
        assert_eq!(component("system:node:a"), "kubelet");
        assert_eq!(component("system:kube-scheduler"), "kube-scheduler");
        assert_eq!(component("ann"), "");
    }

    #[test]
    fn the_program_is_the_printable_start_of_the_user_agent() {
        for (agent, expected) in [
            (&b"kubectl/v1.36 (linux)"[..], "kubectl"),
            ("k\u{fc}be \u{4f60}\u{1f600}/1".as_bytes(), "k\u{fc}be \u{4f60}\u{1f600}"),
            ("e\u{301}'\"\\/1".as_bytes(), "e\u{301}'\"\\"),
            ("a\tb\u{7f}c\u{a0}d\u{200b}e\u{2028}f\u{e000}g".as_bytes(), "abcdefg"),
            (b"a\xffb\xe2\x82", "a\u{fffd}b\u{fffd}\u{fffd}"),
            (b"\t/1", ""),
            (b"", ""),
        ] {
            assert_eq!(program(agent), expected, "{agent:?}");
        }
        assert_eq!(program("x".repeat(200).as_bytes()), "x".repeat(128));
        let long = format!("{}\u{fc}y", "x".repeat(127));
        assert_eq!(
            program(long.as_bytes()),
            "x".repeat(127),
            "the first character without room ends the name"
        );
    }

    #[test]
    fn the_error_of_a_configuration_names_its_object() {
        let config = json!({"metadata": {"namespace": "a", "name": "b"}});
        let of = |group: &str, resource: &str| {
            let kind = by_resource(group, "v1", resource).unwrap();
            not_typed(kind, &config, ".x: duplicate").message
        };
        let start = "failed to create typed patch object (a/b;";
        assert_eq!(of("", "services"), format!("{start} /v1, Kind=Service): .x: duplicate"));
        assert_eq!(of("apps", "deployments"), format!("{start} apps/v1, Kind=Deployment): .x: duplicate"));
    }
}
