//! Creates the resources of a definition, one for each version.

use std::sync::Arc;
use std::time::Instant;

use coracle_custom_resources::columns::{self, PrinterColumn};
use coracle_custom_resources::definition::{Definition, Scale, Version};
use coracle_custom_resources::json_path::JsonPath;
use coracle_custom_resources::schema::SchemaError;
use coracle_custom_resources::{CustomResource, publish};
use coracle_kinds::Resource;
use coracle_kinds::resource::{
    Convert, ResourceNames, ScalePaths, SelectableField, Subresource, Text, version_preference,
};
use serde_json::{Value, json};

use super::conversion::{ConversionClient, WebhookConversion};
use super::strategy::CustomStrategy;
use crate::cel_metrics;

/// The served versions of a definition. They refer to the storage version, even if the storage version is not served.
pub(crate) fn of_definition(
    definition: &Definition,
    client: &ConversionClient,
) -> Result<Vec<Arc<Resource>>, SchemaError> {
    let Some(stored) = definition.storage_version() else { return Ok(Vec::new()) };
    let conversion = WebhookConversion::new(client, definition.spec.conversion.as_ref());
    let conversion = conversion.map(|conversion| Arc::new(conversion) as Arc<dyn Convert>);
    let mut storage = of_version(definition, stored)?;
    storage.convert.clone_from(&conversion);
    let storage = Arc::new(storage);
    let mut served = Vec::new();
    for version in definition.spec.versions.iter().filter(|version| version.served) {
        if version.storage {
            served.push(storage.clone());
            continue;
        }
        let mut resource = of_version(definition, version)?;
        resource.storage = Some(storage.clone());
        resource.convert.clone_from(&conversion);
        served.push(Arc::new(resource));
    }
    Ok(served)
}

fn of_version(definition: &Definition, version: &Version) -> Result<Resource, SchemaError> {
    let names = &definition.status.accepted_names;
    let resource_names = ResourceNames {
        group: definition.spec.group.clone().into(),
        version: version.name.clone().into(),
        kind: names.kind.clone().into(),
        plural: names.plural.clone().into(),
    };
    let printer_columns = columns::of_version(version);
    let rules = compiled(CustomResource::without_rules(definition, version)?);
    let column_definitions = column_definitions(&printer_columns);
    let strategy = CustomStrategy::new(&version.name, &names.kind, rules, printer_columns);
    let schema = publish::name(definition, &version.name, &names.kind);
    let mut resource = Resource::new(resource_names, schema, Arc::new(strategy));
    resource.singular = names.singular.clone().into();
    resource.list_kind = names.list_kind.clone().into();
    resource.short_names = names.short_names.iter().cloned().map(Text::from).collect();
    resource.categories = names.categories.iter().cloned().map(Text::from).collect();
    resource.namespaced = definition.namespaced();
    resource.deprecation = deprecation(definition, version);
    resource.definition = Some(Arc::new(publish::v3(definition, version)));
    resource.definition_v2 = Some(Arc::new(publish::v2(definition, version)));
    resource.unconditional_update = false;
    resource.has_generation = true;
    resource.has_status = version.has_status();
    resource.columns = column_definitions;
    resource.subresources = subresources(definition, version);
    resource.scale = version.scale().and_then(scale_paths);
    for field in &version.selectable_fields {
        resource.fields.push(SelectableField::at_path(field.json_path.trim_start_matches('.')));
    }
    resource.is_terminating = definition.is_terminating();
    Ok(resource)
}

/// Compiles the rules in CEL, and counts the compilation.
fn compiled(rules: CustomResource) -> CustomResource {
    let began = Instant::now();
    let rules = rules.with_rules();
    if rules.has_rules() {
        cel_metrics::compiled(began.elapsed());
    }
    rules
}

/// A resource whose objects have a `spec` of this schema.
#[cfg(test)]
pub(crate) fn with_spec(spec: &Value) -> Resource {
    let schema = json!({"type": "object", "properties": {"spec": spec}});
    let names = json!({"kind": "Cup", "plural": "cups", "singular": "cup", "listKind": "CupList"});
    let version =
        json!({"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}});
    let definition = json!({"metadata": {"name": "cups.a.example"}, "status": {"acceptedNames": names},
        "spec": {"group": "a.example", "scope": "Namespaced", "names": names, "versions": [version]}});
    let definition = Definition::parse(&definition).unwrap();
    of_version(&definition, definition.version("v1").unwrap()).unwrap()
}

/// The warning about a deprecated version. Unless the definition sets the text, the warning names the preferred newer
/// version that is served and not deprecated.
fn deprecation(definition: &Definition, version: &Version) -> Option<Text> {
    let (group, kind) = (&definition.spec.group, &definition.spec.names.kind);
    let text = version.warning(group, kind)?;
    let rank = |version: &Version| version_preference(&version.name);
    let newer = definition.spec.versions.iter().filter(|other| other.served && !other.deprecated);
    let newer = newer.filter(|other| rank(other) < rank(version)).min_by_key(|other| rank(other));
    match newer {
        Some(newer) if version.deprecation_warning.is_none() => {
            Some(format!("{text}; use {group}/{} {kind}", newer.name).into())
        }
        _ => Some(text.into()),
    }
}

fn subresources(definition: &Definition, version: &Version) -> Vec<Subresource> {
    let verbs = || ["get", "patch", "update"].into_iter().map(Text::from).collect();
    let mut found = Vec::new();
    if version.has_status() {
        found.push(Subresource {
            name: "status".into(),
            group: definition.spec.group.clone().into(),
            version: version.name.clone().into(),
            kind: definition.spec.names.kind.clone().into(),
            verbs: verbs(),
        });
    }
    if version.scale().is_some() {
        found.push(Subresource {
            name: "scale".into(),
            group: "autoscaling".into(),
            version: "v1".into(),
            kind: "Scale".into(),
            verbs: verbs(),
        });
    }
    found
}

fn scale_paths(scale: &Scale) -> Option<ScalePaths> {
    let fields = |path: &str| -> Option<Vec<String>> {
        Some(JsonPath::parse(path)?.fields()?.into_iter().map(str::to_owned).collect())
    };
    Some(ScalePaths {
        spec_replicas: fields(&scale.spec_replicas_path)?,
        status_replicas: fields(&scale.status_replicas_path)?,
        selector: scale.label_selector_path.as_deref().and_then(fields),
    })
}

fn column_definitions(columns: &[PrinterColumn]) -> Value {
    let description = "Name must be unique within a namespace. Is required when creating resources, although some \
                       resources may allow a client to request the generation of an appropriate name automatically. \
                       Name is primarily intended for creation idempotence and configuration definition. Cannot be \
                       updated. More info: \
                       https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names";
    let name = json!({"name": "Name", "type": "string", "format": "name", "description": description, "priority": 0});
    let others = columns.iter().map(|column| {
        json!({
            "name": column.name, "type": column.kind, "format": column.format, "description": column.description,
            "priority": column.priority,
        })
    });
    Value::Array(std::iter::once(name).chain(others).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deprecated_version_names_the_newest_one() {
        let version = |name: &str, served: bool, deprecated: bool| json!({"name": name, "served": served, "deprecated": deprecated});
        let mut object = json!({"spec": {"group": "a.example", "names": {"kind": "Cup"}, "versions": [
            version("v1alpha1", true, true), version("v1beta1", true, false), version("v1", true, false),
            version("v2", false, false), version("v3", true, true)]}});
        let warning = |object: &Value, name: &str| {
            let definition = Definition::parse(object).unwrap();
            deprecation(&definition, definition.version(name).unwrap()).map(Text::into_owned)
        };
        let newest = "a.example/v1alpha1 Cup is deprecated; use a.example/v1 Cup";
        assert_eq!(warning(&object, "v1alpha1").as_deref(), Some(newest));
        assert_eq!(warning(&object, "v1"), None);
        assert_eq!(warning(&object, "v3").as_deref(), Some("a.example/v3 Cup is deprecated"));
        object["spec"]["versions"][0]["deprecationWarning"] = "use cups".into();
        assert_eq!(warning(&object, "v1alpha1").as_deref(), Some("use cups"));
    }
}
