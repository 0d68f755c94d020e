//! Pod networking: CNI types, bridge, host-local addresses, port mapping and masquerading over netlink.
