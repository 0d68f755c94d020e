//! Entry points of the fuzz targets in `integration/fuzz`, and the test that replays their corpora with a stable
//! compiler. Each entry point accepts any bytes. It fails if it panics or exceeds the fuzzer's limits on time and
//! memory.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use coracle_custom_resources::json_path::JsonPath;
use coracle_custom_resources::{CustomResource, Definition, Violations, write_whole_numbers};
use coracle_managed_fields::{
    ApplyRequest, FieldSet, Managers, PathElement, Schema, SingleVersion, UpdateRequest, Updater,
};
use coracle_schedule::{Schedule, TimeZone};
use coracle_values::Quantity;
use serde_json::{Value, json};

use crate::{
    Resource, defaults, kind, patch, protobuf,
    schema::{self, FieldValidation},
    selector::{FieldSelector, LabelSelector, SelectorAttributes},
    strategy, table, validate,
};

/// Patches of all three types. The input is two JSON documents, an object and a patch, with a line end between them.
pub fn patch(data: &[u8]) {
    let Some(line) = data.iter().position(|byte| *byte == b'\n') else { return };
    let (object, rest) = data.split_at(line);
    let [Ok(object), Ok(patch)] = [object, rest].map(serde_json::from_slice::<Value>) else { return };
    if !object.is_object() {
        return;
    }
    let pod = "io.k8s.api.core.v1.Pod";
    let patched =
        [patch::json(&object, &patch), patch::merge(&object, &patch), patch::strategic(pod, &object, &patch)];
    // The result must be readable after it was stored.
    for patched in patched.into_iter().flatten() {
        assert!(serde_json::from_str::<Value>(&patched.to_string()).is_ok(), "a patch made {patched}");
    }
}

/// Bodies of `application/vnd.kubernetes.protobuf`.
pub fn protobuf(data: &[u8]) {
    if let Ok(object) = protobuf::decode(data) {
        assert!(object.is_object(), "a body became {object}");
    }
}

/// JSON bodies, with the check against a schema.
pub fn json(data: &[u8]) {
    let _refused = schema::parse_json(data);
}

/// Label and field selectors of query strings.
pub fn selector(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _refused = LabelSelector::parse(text);
    if let Some(pods) = crate::kind::by_resource("", "v1", "pods") {
        let _refused = FieldSelector::parse(pods, text);
    }
}

/// Objects of the built-in kinds through all stages of a create, and of an update. The input is one object or two of
/// the same kind in JSON, with a line end between them.
pub fn object(data: &[u8]) {
    let line = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (first, second) = data.split_at(line);
    let Some((kind, old)) = created(first) else { return };
    let Some((same, new)) = created(second).filter(|(same, _)| same.kind == kind.kind) else { return };
    let mut updated = new.clone();
    strategy::prepare_for_update(kind, &mut updated, &old);
    let _causes = validate::ratcheted(same, &updated, &old, validate::update);
    let mut status = new.clone();
    strategy::prepare_for_status_update(kind, &mut status, &old);
    let _causes = validate::ratcheted(same, &status, &old, validate::status_update);
    if kind.is("", "Pod") {
        let _causes = validate::ephemeral_containers(&new, &old);
        let _causes = validate::resize(&new, &old);
    }
}

/// The object that a create would store, in the form of a response. `None` if the create is refused.
fn created(text: &[u8]) -> Option<(&'static Resource, Value)> {
    let parsed = schema::parse_json(text).ok()?;
    let field = |name: &str| parsed.value[name].as_str().unwrap_or_default().to_owned();
    let kind: &'static Resource = kind::by_kind(&field("apiVersion"), &field("kind"))?;
    let (mut object, _) = kind.strategy().decode(parsed, FieldValidation::Warn).ok()?;
    if object["metadata"].is_null() {
        object["metadata"] = json!({});
    }
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.insert("uid".to_owned(), json!("00000000-0000-4000-8000-000000000000"));
    }
    defaults::apply(kind, &mut object);
    strategy::prepare_for_create(kind, &mut object);
    defaults::apply(kind, &mut object);
    strategy::prepare_named(kind, &mut object);
    let causes = validate::create(kind, &object);
    let options = table::Options {
        content: table::Content::default(),
        headers: true,
        now: jiff::Timestamp::UNIX_EPOCH,
    };
    let _shown = table::render(kind, [&object], Value::Null, options);
    let _metadata = table::partial_metadata(&object, table::MetaVersion::V1);
    let _attributes = SelectorAttributes::read(kind, object.to_string().as_bytes());
    causes.is_empty().then_some((kind, object))
}

/// Requests for certificates, through all stages of a create. The input is a PKCS#10 request in PEM or in DER.
pub fn certificate_request(data: &[u8]) {
    let pem = if data.starts_with(b"-----") {
        data.to_vec()
    } else {
        let text = BASE64_STANDARD.encode(data);
        format!("-----BEGIN CERTIFICATE REQUEST-----\n{text}\n-----END CERTIFICATE REQUEST-----\n")
            .into_bytes()
    };
    let object = json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": "fuzz"},
        "spec": {
            "request": BASE64_STANDARD.encode(pem),
            "signerName": "example.com/fuzz",
            "usages": ["client auth"],
        },
    });
    let _refused = created(object.to_string().as_bytes());
}

/// Custom resources. The input is lines of JSON: the schema of a definition (`openAPIV3Schema`), an object, and
/// optionally the object before an update.
pub fn custom_resource(data: &[u8]) {
    let mut lines = data.splitn(3, |byte| *byte == b'\n').map(schema::parse_json);
    let (Some(Ok(schema)), Some(Ok(object))) = (lines.next(), lines.next()) else { return };
    let Some(rules) = defined(schema.value) else { return };
    let Some(new) = completed(&rules, object.value) else { return };
    let mut violations = Violations::default();
    rules.validate(&new, None, &mut violations);
    let Some(Ok(old)) = lines.next() else { return };
    let Some(old) = completed(&rules, old.value) else { return };
    let mut violations = Violations::default();
    rules.validate(&new, Some(&old), &mut violations);
    rules.validate_status(&new, &old, &mut violations);
}

/// The checks of a custom resource with a schema. `None` if the definition is refused.
fn defined(schema: Value) -> Option<CustomResource> {
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"},
        "spec": {
            "group": "example.com",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
            "scope": "Namespaced",
            "versions": [{
                "name": "v1",
                "served": true,
                "storage": true,
                "schema": {"openAPIV3Schema": schema},
                "subresources": {"status": {}},
            }],
        },
    });
    let (_, definition) = created(definition.to_string().as_bytes())?;
    let definition = Definition::parse(&definition).ok()?;
    CustomResource::new(&definition, definition.version("v1")?).ok()
}

/// A custom resource after it was pruned and its defaults were set. `None` if it is refused.
fn completed(rules: &CustomResource, mut object: Value) -> Option<Value> {
    if !object.is_object() {
        return None;
    }
    write_whole_numbers(&mut object);
    let mut violations = Violations::default();
    let _unknown = rules.prune(&mut object, &mut violations);
    if !violations.is_empty() {
        return None;
    }
    rules.default(&mut object).ok()?;
    Some(object)
}

/// Quantities. Formatting and parsing a quantity does not change it.
pub fn quantity(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(quantity) = Quantity::parse(text) else { return };
    let written = quantity.to_string();
    let again = Quantity::parse(&written);
    assert_eq!(again.map(Quantity::thousandths), Ok(quantity.thousandths()), "{text:?} became {written:?}");
    let _sum = (quantity.plus(quantity), quantity.millis(), quantity.value());
}

/// Schedules of cron jobs. The input is a schedule and the name of a time zone, with a line end between them.
pub fn schedule(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (schedule, zone) = text.split_once('\n').unwrap_or((text, "UTC"));
    let Ok(schedule) = schedule.parse::<Schedule>() else { return };
    let zone = zone.parse().unwrap_or_else(|_unknown| TimeZone::utc());
    let after = jiff::Timestamp::UNIX_EPOCH;
    if let Some(next) = schedule.next(after, &zone) {
        assert!(next > after, "{text:?} fires at {next}");
    }
}

/// Paths of printer columns. The input is a path and a JSON document, with a line end between them.
pub fn json_path(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (path, document) = text.split_once('\n').unwrap_or((&text, "null"));
    let exceeds = JsonPath::exceeds_limits(path);
    let Some(path) = JsonPath::parse(path) else { return };
    assert!(!exceeds, "a path beyond the limits was parsed");
    let document = serde_json::from_str(document).unwrap_or_default();
    let _found = path.find(&document);
}

/// Field sets, `managedFields` and server-side apply. The input is three JSON documents on lines: `managedFields`, a
/// live object, and a configuration.
pub fn fields(data: &[u8]) {
    let mut lines = data.splitn(3, |byte| *byte == b'\n').map(serde_json::from_slice::<Value>);
    let (Some(Ok(entries)), Some(Ok(live)), Some(Ok(config))) = (lines.next(), lines.next(), lines.next())
    else {
        return;
    };
    if let Ok(set) = FieldSet::from_json(&entries) {
        assert_eq!(FieldSet::from_json(&set.to_json()).as_ref(), Ok(&set));
    }
    let managers = Managers::from_json(&entries).unwrap_or_default();
    assert_eq!(Managers::from_json(&managers.to_json()).as_ref(), Ok(&managers));
    let schema = Schema::default();
    let versions = SingleVersion { api_version: "v1", schema: &schema, of: Schema::deduced() };
    let mut ignored = FieldSet::default();
    ignored.insert(&[PathElement::field("status")]);
    let now = "2026-01-01T00:00:00Z";
    let updater = Updater { versions: &versions, api_version: "v1", subresource: "", ignored: &ignored, now };
    for force in [false, true] {
        let request = ApplyRequest { live: &live, config: &config, manager: "fuzz", force };
        if let Ok(applied) = updater.apply(request, managers.clone()) {
            let written = applied.managers.to_json();
            assert!(Managers::from_json(&written).is_ok(), "unreadable owners: {written}");
        }
    }
    let request = UpdateRequest { live: &live, new: &config, manager: "fuzz" };
    let _owners = updater.update(request, managers);
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    #[test]
    fn the_corpora_are_replayed() {
        type Target = fn(&[u8]);
        let targets: [(&str, Target); 11] = [
            ("patch", super::patch),
            ("protobuf", super::protobuf),
            ("json", super::json),
            ("selector", super::selector),
            ("object", super::object),
            ("quantity", super::quantity),
            ("schedule", super::schedule),
            ("json_path", super::json_path),
            ("fields", super::fields),
            ("certificate_request", super::certificate_request),
            ("custom_resource", super::custom_resource),
        ];
        for (name, target) in targets {
            coracle_testing::replay_corpus(name, target);
        }
    }

    #[test]
    fn the_schemas_of_the_corpus_are_accepted() {
        for input in coracle_testing::corpus("custom_resource") {
            let text = std::fs::read_to_string(&input).unwrap();
            let schema = serde_json::from_str(text.lines().next().unwrap()).unwrap();
            assert!(super::defined(schema).is_some(), "not valid: {}", input.display());
        }
    }

    /// The path of each value of a tree: keys and indexes.
    fn places(value: &Value, path: &str, found: &mut Vec<String>) {
        found.push(path.to_owned());
        match value {
            Value::Object(map) => {
                map.iter().for_each(|(key, below)| {
                    let key = key.replace('~', "~0").replace('/', "~1");
                    places(below, &format!("{path}/{key}"), found);
                });
            }
            Value::Array(list) => {
                list.iter().enumerate().for_each(|(at, below)| places(below, &format!("{path}/{at}"), found));
            }
            _ => {}
        }
    }

    #[test]
    fn odd_values_at_any_place_of_an_object_are_refused_or_accepted_without_a_panic() {
        let odd = [
            json!(null),
            json!(""),
            json!("\u{e9}".repeat(40)),
            json!("-1"),
            json!("9".repeat(40)),
            json!(i64::MIN),
            json!(i64::MAX),
            json!(i32::MAX),
            json!([]),
            json!([null]),
            json!({}),
            json!({"\u{e9}": {"\u{e9}": null}}),
        ];
        for input in coracle_testing::corpus("object") {
            let text = std::fs::read_to_string(input).unwrap();
            let first: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
            assert!(super::created(first.to_string().as_bytes()).is_some(), "not valid: {first}");
            let mut all = Vec::new();
            places(&first, "", &mut all);
            for (place, value) in all.iter().flat_map(|place| odd.iter().map(move |value| (place, value))) {
                let mut changed = first.clone();
                if let Some(slot) = changed.pointer_mut(place) {
                    *slot = value.clone();
                }
                super::object(format!("{first}\n{changed}").as_bytes());
            }
        }
    }
}
