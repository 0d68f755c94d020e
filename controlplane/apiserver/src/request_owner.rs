//! The owner of the current request: its user, or all service accounts of a namespace. Queues that requests of all
//! users share use it to be fair.

use std::sync::Arc;

tokio::task_local! {
    static OWNER: Arc<str>;
}

/// Runs a request of an owner. All members of `system:masters`, and tasks without a request, have an empty name. The
/// limits of one owner on connections to webhooks and on waits in `long_work` do not apply to them. Elsewhere they
/// count as one owner.
pub(crate) async fn scope<F: Future>(owner: Arc<str>, request: F) -> F::Output {
    OWNER.scope(owner, request).await
}

/// The owner of the request that the task handles. Empty in tasks that handle no request.
pub(crate) fn current() -> Arc<str> {
    OWNER.try_with(Arc::clone).unwrap_or_else(|_no_request| "".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_owner_is_known_within_its_request_only() {
        let inner = async {
            tokio::task::yield_now().await;
            let nested = scope("bob".into(), async { current() }).await;
            (current(), nested, tokio::spawn(async { current() }).await.unwrap())
        };
        let [eve, bob, none]: [Arc<str>; 3] = ["eve", "bob", ""].map(Arc::from);
        assert_eq!(scope(eve.clone(), inner).await, (eve, bob, none.clone()));
        assert_eq!(current(), none);
    }
}
