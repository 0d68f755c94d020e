//! Controller of the definitions of custom resources.
//!
//! | part | module |
//! |---|---|
//! | names, conditions, resources of the registry | `controller` |
//! | deletes the objects of a deleted definition | `cleanup` |
//! | changes of definitions by this server | `stored` |
//!
//! A definition is served before its condition `Established` is written. A client that waits for the condition can use
//! the resource immediately.

mod cleanup;
mod controller;
mod stored;

pub(crate) use controller::start;
