"""Memory of a worker: layout, scope, pools, leases, quarantine. Knows no engine, no socket and no room.

`spec` and `layout` are pure (what there is and where it lies); `allocator`, `lease` and `quarantine` keep the books
(no torch); `scope`, `adopt`, `views`, `pools` and `live` touch bytes.
"""
