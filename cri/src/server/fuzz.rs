//! Fuzz targets for gRPC clients, and for configurations of pods and containers.

use coracle_proto::cri;
use oci_spec::runtime::Spec;
use prost::Message;

use crate::container::fields;
use crate::container::oci_spec::sample;
use crate::error::Error;
use crate::host::Host;
use crate::namespaces;
use crate::services::containers::check::check as check_container;
use crate::services::sandboxes::check as check_sandbox;

/// The bytes of a client after the preface of HTTP/2.
pub(crate) fn client(data: &[u8]) {
    super::authority::fuzz(data);
}

/// A request for a container with its pod's configuration: refused, or converted to a spec that can be encoded.
pub(crate) fn config(data: &[u8]) {
    let Ok(request) = cri::CreateContainerRequest::decode(data) else { return };
    if let Ok(spec) = spec(request) {
        let written = serde_json::to_vec(&spec);
        assert!(written.is_ok(), "{written:?}");
    }
}

fn spec(request: cri::CreateContainerRequest) -> Result<Spec, Error> {
    let (config, sandbox) = (request.config.unwrap_or_default(), request.sandbox_config.unwrap_or_default());
    let host = Host { hugetlb: true, ..sample::host() };
    check_sandbox(&sandbox, "", &host)?;
    check_container(&config, &host)?;
    fields::check_shared(&config, &namespaces::options(&sandbox))?;
    sample::spec(&config, &sandbox, &host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_valid() {
        for path in coracle_testing::corpus("config") {
            let request = cri::CreateContainerRequest::decode(&*std::fs::read(&path).unwrap()).unwrap();
            let refused = spec(request).err();
            assert!(refused.is_none(), "{}: {refused:?}", path.display());
        }
    }
}
