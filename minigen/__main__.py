from minigen.cli import main

raise SystemExit(main())
