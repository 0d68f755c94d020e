//! CEL types of built-in definitions (`SchemaDeclType` of upstream).
//!
//! Fields that the schema does not describe, quantities, and recursive definitions have the type `dyn`, so expressions
//! may select any of their fields. In upstream these types have no fields, so upstream also warns about correct
//! expressions.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use coracle_cel::{Field, ObjectType, Type, escape};

use crate::schema::METADATA;
use crate::schema::model::{self, DefinitionId, Schemas, ValueType};

/// The type of the objects of a definition. `None` if there is no definition with this name. Each call builds the type,
/// because the type is rarely needed, and takes about as much memory as the definitions that it reaches.
pub fn cel_type(name: &str) -> Option<Type> {
    let schemas = model::schemas();
    let id = schemas.id(name)?;
    Some(Builder { schemas, known: HashMap::new() }.object(id))
}

/// The CEL type of `metadata` of all objects.
pub fn metadata_type() -> Type {
    cel_type(METADATA).unwrap_or(Type::Dyn)
}

struct Builder {
    schemas: &'static Schemas,
    /// The types of definitions. `None` while the type is being built.
    known: HashMap<usize, Option<Type>>,
}

// === impl Builder ===

impl Builder {
    /// The type of a definition. Each definition is built once, so the recursion ends. Its depth is at most the number
    /// of definitions that are nested in each other.
    fn object(&mut self, id: DefinitionId) -> Type {
        match self.known.get(&id.index()) {
            Some(Some(kind)) => return kind.clone(),
            Some(None) => return Type::Dyn,
            None => {}
        }
        self.known.insert(id.index(), None);
        let schemas = self.schemas;
        let definition = schemas.get(id);
        let mut fields = BTreeMap::new();
        for property in &definition.properties {
            let Some(identifier) = escape::escape(&property.name) else { continue };
            let kind = self.value(&property.value_type);
            fields.insert(identifier.into_boxed_str(), Field { name: property.name.clone(), kind });
        }
        let kind = match fields.is_empty() {
            true => Type::Dyn,
            false => Type::Object(Arc::new(ObjectType::new(definition.name.to_string(), fields))),
        };
        self.known.insert(id.index(), Some(kind.clone()));
        kind
    }

    fn value(&mut self, value_type: &ValueType) -> Type {
        match value_type {
            ValueType::Any | ValueType::IntOrString | ValueType::Quantity | ValueType::Choice(_) => Type::Dyn,
            ValueType::Bool => Type::Bool,
            ValueType::Int32 | ValueType::Int64 => Type::Int,
            ValueType::Number => Type::Double,
            ValueType::Text => Type::String,
            ValueType::Bytes => Type::Bytes,
            ValueType::Time | ValueType::MicroTime => Type::Timestamp,
            ValueType::Object(id) => self.object(*id),
            ValueType::List(item) => Type::list(self.value(item)),
            ValueType::Map(value) => Type::Map(Arc::new(self.value(value))),
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_cel::{Environment, Program};

    use super::*;

    fn compile(definition: &str, source: &str) -> Result<String, String> {
        let kind = cel_type(definition).unwrap();
        let environment = Environment::default().variable("object", kind);
        match Program::compile(source, &environment) {
            Ok(program) => Ok(program.kind().to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn fields_of_built_in_kinds_have_types() {
        let deployment = "io.k8s.api.apps.v1.Deployment";
        for (source, expect) in [
            ("object.spec.replicas", "int"),
            ("object.metadata.labels", "map(string, string)"),
            ("object.metadata.creationTimestamp", "google.protobuf.Timestamp"),
            ("object.spec.template.spec.containers[0].image", "string"),
            ("object.spec.template.spec.containers[0].resources.limits['cpu']", "dyn"),
            ("object.spec.strategy.rollingUpdate.maxSurge", "dyn"),
            ("object.spec.template.spec.hostNetwork", "bool"),
            ("object.spec", "io.k8s.api.apps.v1.DeploymentSpec"),
        ] {
            assert_eq!(compile(deployment, source).as_deref(), Ok(expect), "{source}");
        }
        let error = compile(deployment, "object.spec.maxRetries").unwrap_err();
        assert!(error.contains("undefined field 'maxRetries'"), "{error}");
        assert_eq!(compile("io.k8s.api.core.v1.Secret", "object.data['a']").as_deref(), Ok("bytes"));
        assert_eq!(cel_type("io.k8s.Nothing"), None);
    }

    #[test]
    fn a_definition_within_itself_has_any_type() {
        let crd = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition";
        let schema = "object.spec.versions[0].schema.openAPIV3Schema";
        assert_eq!(compile(crd, &format!("{schema}.description")).as_deref(), Ok("string"));
        assert_eq!(compile(crd, &format!("{schema}.properties['a'].anything")).as_deref(), Ok("dyn"));
    }

    #[test]
    fn every_definition_has_a_type_of_limited_size() {
        let schemas = model::schemas();
        for definition in schemas.all() {
            let mut builder = Builder { schemas, known: HashMap::new() };
            let _type = builder.object(schemas.id(&definition.name).unwrap());
            assert!(builder.known.len() < 500, "{}", definition.name);
        }
    }
}
