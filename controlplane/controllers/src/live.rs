//! Reads from the API server. They are used for decisions that must not rely on a cache, because a cache may lack a new
//! object.

use kube::api::{ListParams, Request};
use kube::core::ObjectList;
use kube::{Api, Client};

use crate::error::Error;
use crate::object::{Key, Node, Object};

/// Maximum number of objects in one page of a list.
const PAGE: u32 = 500;

/// Whether an object of a kind matches, in one namespace, or in all namespaces if `namespace` is empty. Reads the list
/// in pages, up to the first object that matches.
pub(crate) async fn any<K: Object>(
    client: &Client,
    namespace: &str,
    mut matches: impl FnMut(&K) -> bool,
) -> Result<bool, Error> {
    let failed = |source| {
        let object = format!("{} {}", K::kind(&()), Key::new(namespace, "*"));
        Error::Request { verb: "list", object, source }
    };
    let url = K::url_path(&(), (!namespace.is_empty()).then_some(namespace));
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let request = Request::new(url.clone()).list(&page).map_err(kube::Error::BuildRequest);
        let listed: ObjectList<K> = client.request(request.map_err(failed)?).await.map_err(failed)?;
        if listed.items.iter().any(&mut matches) {
            return Ok(true);
        }
        match listed.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(false),
        }
    }
}

/// Whether a node with this name exists.
pub(crate) async fn has_node(client: &Client, name: &str) -> Result<bool, Error> {
    let nodes: Api<Node> = Api::all(client.clone());
    let failed = |source| Error::Request { verb: "get", object: format!("Node {name}"), source };
    Ok(nodes.get_opt(name).await.map_err(failed)?.is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::object::{ObjectExt, Pod};
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_list_is_read_to_its_last_page() {
        let list = |name: &str, rest: &str| {
            let pod = json!({"metadata": {"name": name, "namespace": "n"}});
            json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"continue": rest}, "items": [pod]})
        };
        let pods = "/api/v1/namespaces/n/pods";
        let second = format!("{pods}?continue=rest");
        let api = TestApi::new(&[(pods, list("a", "rest")), (&second, list("b", ""))]);
        for (name, expect) in [("a", true), ("b", true), ("c", false)] {
            let found = any(&api.context.client, "n", |pod: &Pod| pod.name() == name).await.unwrap();
            assert_eq!(found, expect, "{name}");
        }
    }
}
